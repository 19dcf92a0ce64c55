"""`preble workload make`: a workload as a trace file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from preble.cli.options import option
from preble.cli.output import OUTPUT_FILE, writing
from preble.cli.workload_options import seeded_workload_options, workload_plan

DEFAULT_REQUESTS = 5000
"""Requests of a named workload, which has no end."""


@click.command("make")
@click.argument("source", metavar="NAME|FILE|MIX")
@option("-o --out", "The trace file; compressed if it ends in .gz.", OUTPUT_FILE, required=True)
@seeded_workload_options(DEFAULT_REQUESTS)
def command(source: str, out: Path, requests: int | None, **options: Any) -> None:
    """Write a workload as a trace file: the requests that other commands send with the same options.

    docs/reference/workloads.md describes the workloads and mixes of them.

    Without --rps, and without times of its own, the trace has no times; the command that sends it then needs --rps.

    \b
    Examples:
      preble workload make video --requests 2000 --rps 4 -o video.jsonl.gz
      preble workload make toolbench:2+video:1 --requests 3000 --rps 6 --arrivals gamma --cv 3 -o mix.jsonl.gz
      preble workload make trace.jsonl --popularity zipf --requests 10000 -o skewed.jsonl.gz
    """
    from preble.lab.workloads import write_trace

    plan, _ = workload_plan(source, requests, DEFAULT_REQUESTS, **options)
    workload = plan.make(needs_times=False)
    with writing(out):
        write_trace(out, workload)
    click.echo(f"{out}: {len(workload.requests):,} requests; {workload.note}", err=True)
