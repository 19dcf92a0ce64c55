"""`preble workload`: what workloads and traces are like."""

from __future__ import annotations

from types import MappingProxyType

import click

from preble.cli import LazyGroup

COMMANDS = MappingProxyType({"study": "preble.cli.study"})


@click.group("workload", cls=LazyGroup, modules=COMMANDS, short_help="What workloads and traces are like.")
def command() -> None:
    """What workloads and traces are like.

    \b
    Example:
      preble workload study trace.jsonl.gz --html study.html
    """
