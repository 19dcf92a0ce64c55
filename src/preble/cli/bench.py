"""`preble bench`: send load to an endpoint, open loop."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from preble.cli.failure import INTERRUPTED_STATUS
from preble.cli.gateway_pages import GATEWAY
from preble.cli.options import HTTP_URL, POSITIVE_FLOAT, api_key_option, option
from preble.cli.output import DRAWN_FILE, json_option, write_json, writing
from preble.cli.workload_options import DEFAULT_RPS, workload_options, workload_plan

if TYPE_CHECKING:
    from preble.lab.bench import BenchResult, BenchSettings

DEFAULT_REQUESTS = 200
"""Requests of a named workload, which has no end."""


@click.command("bench")
@option("--url", "The endpoint: Preble, or any OpenAI-compatible server.", HTTP_URL, default=GATEWAY)
@workload_options(DEFAULT_REQUESTS)
@option("--model", "Model to ask for.  [default: the first that the endpoint serves]")
@option(
    "--replica replicas",
    "A replica behind the endpoint; its own cache counters are read too. Repeatable.",
    HTTP_URL,
    multiple=True,
)
@option("--slo-ttft", "Limit of TTFT in seconds; reports goodput.", POSITIVE_FLOAT, metavar="S")
@option("--slo-tpot", "Limit of TPOT in seconds; reports goodput.", POSITIVE_FLOAT, metavar="S")
@option("--timeout timeout_s", "The most seconds that a request may take.", POSITIVE_FLOAT, default=600.0)
@option(
    "--ignore-eos/--no-ignore-eos",
    "Ask for exactly the workload's output lengths; turn it off for servers without this field.",
    default=True,
)
@api_key_option
@json_option("the result with every record")
@option("--plot", "Draw latency distributions (needs the extra `plot`).", DRAWN_FILE, metavar="PNG")
def command(api_key: str | None, json_file: Path | None, plot: Path | None, **options: Any) -> None:
    """Send a workload to an endpoint at fixed times (open loop), and measure TTFT, TPOT, E2E and hit rate.

    Latencies count from the scheduled time, so that a slow server does not slow the load down. Ctrl-C ends the run and
    reports a partial result. The exit status is 1 if a request failed.

    \b
    Examples:
      preble bench
      preble bench --url http://gateway:8000 --workload longdoc --rps 2 --requests 200
      preble bench --workload trace.jsonl.gz --json result.json
    """
    from preble.lab.bench import BenchRun
    from preble.lab.bench.run import run_with_progress

    settings = _settings(**options)
    run = BenchRun(settings, api_key=api_key)
    interrupted = False
    try:
        asyncio.run(run_with_progress(run, settings.plan.source))
    except KeyboardInterrupt:
        interrupted = True
    result = run.result()
    _deliver(result, json_file, plot)
    if interrupted:
        click.echo("preble: interrupted; the result is partial", err=True)
        sys.exit(INTERRUPTED_STATUS)
    if result.summary.errors:
        click.echo(f"preble: {result.summary.errors} of {result.summary.requests} requests failed", err=True)
        raise click.exceptions.Exit(1)


def _settings(
    *, slo_ttft: float | None, slo_tpot: float | None, requests: int | None, workload: str, **rest: Any
) -> BenchSettings:
    from preble.lab.bench import BenchSettings
    from preble.lab.metrics import Slo

    plan, rest = workload_plan(workload, requests, DEFAULT_REQUESTS, DEFAULT_RPS, **rest)
    slo = Slo(ttft_s=slo_ttft, tpot_s=slo_tpot) if slo_ttft or slo_tpot else None
    return BenchSettings(plan=plan, slo=slo, **rest)


def _deliver(result: BenchResult, json_file: Path | None, plot: Path | None) -> None:
    from rich.console import Console

    from preble.lab.bench.report import print_results

    if write_json(json_file, result):
        print_results(Console(), {result.settings.plan.source: result})
    if plot is not None:
        from preble.lab.bench.plot import draw_results

        name = result.settings.plan.source
        with writing(plot):
            draw_results({name: result}, plot, f"{name}: {result.workload_note}")
