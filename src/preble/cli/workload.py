"""`preble workload`: make and study workloads."""

from __future__ import annotations

from types import MappingProxyType

import click

from preble.cli import LazyGroup

COMMANDS = MappingProxyType({"make": "preble.cli.make_workload", "study": "preble.cli.study"})


@click.group(
    "workload", cls=LazyGroup, modules=COMMANDS, short_help="Make workloads; study what they and traces are like."
)
def command() -> None:
    """Make workloads, and study them or traces.

    \b
    Examples:
      preble workload make video --requests 2000 --rps 4 -o video.jsonl.gz
      preble workload study trace.jsonl.gz --html study.html
    """
