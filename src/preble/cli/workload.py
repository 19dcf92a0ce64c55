"""`preble workload`: make and study workloads."""

from __future__ import annotations

from types import MappingProxyType

import click

from preble.cli import LazyGroup, Listed

COMMANDS = MappingProxyType(
    {
        "make": Listed("preble.cli.make_workload", "Write a workload as a trace file."),
        "study": Listed("preble.cli.study", "What prompts share, how long they are, how they arrive."),
    }
)


@click.group("workload", cls=LazyGroup, listed=COMMANDS)
def command() -> None:
    """Make workloads, and study them or traces.

    \b
    Examples:
      preble workload make video --requests 2000 --rps 4 -o video.jsonl.gz
      preble workload study trace.jsonl.gz --html study.html
    """
