"""`preble compare`: which policy carries most, on simulated replicas."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from preble.cli.cluster_options import cluster_options, simulated_cluster
from preble.cli.failure import INTERRUPTED_STATUS
from preble.cli.options import POSITIVE, POSITIVE_FLOAT, Read, option
from preble.cli.output import DRAWN_FILE, STDOUT, json_option, made_by, write_json, write_result
from preble.cli.workload_options import WORKLOAD_HELP, workload_plan, workload_shape_options
from preble.errors import ConfigError

if TYPE_CHECKING:
    from preble.lab.compare import ComparePlan, CompareResult
    from preble.lab.workloads import WorkloadPlan

KEPT = Path("build/compare.json")
"""Where runs are kept if nobody names a file."""
MOST_KEPT_BYTES = 16 << 20
"""Over this, the file that nobody named is begun anew: it is written after each run."""
RECORDED_REQUESTS = 2000
"""Of a named workload whose arrivals are a recording's."""
LASTING_WINDOWS = 3
"""How many of the policy's windows a run of a search lasts: what it forgets after one shows in the second."""
QUICK_WINDOWS = 1.5
"""And a run without a search: one window after the warm-up."""
SEARCHED_LOADS, QUICK_LOADS = (0.8,), (0.3, 0.6)
"""Shares of the best capacity; and of what no policy sustains, where policies begin to differ, and where they do."""
DEFAULT_TTFT_S = 2.0
"""MLPerf's bound on the p99 of TTFT for Llama 2 70B in its server scenario."""
PIPED_WIDTH = 120
"""Of tables that do not go to a terminal."""
EVERY = "all"
QUICK, SEARCHED, RECORDED = "quick", "auto", "recorded"


def _listed(name: str, read: Callable[[str], Any]) -> Read:
    """Return a type of values with commas between them."""
    return Read(name, lambda text: tuple(read(part.strip()) for part in text.split(",")))


class ListingCommand(click.Command):
    """A command whose options take lists with commas. Spaces between the values are an error with a hint."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if "unexpected extra argument" not in error.message:
                raise
            hint = "Put commas between the values of an option, without spaces"
            raise click.UsageError(f"{error.message}. {hint}", ctx) from error


def _bound(text: str) -> tuple[str, float]:
    workload, _, seconds = text.rpartition("=")
    return workload, float(POSITIVE_FLOAT(seconds))


_BOUND = Read("bound", _bound)
"""A bound in seconds with the label of a workload before it, or "" for every workload."""


def _rate(text: str) -> float | str | None:
    return text if text in (QUICK, SEARCHED) else None if text == RECORDED else float(text)


@click.command("compare", cls=ListingCommand)
@option(
    "--workload sources",
    f"{WORKLOAD_HELP} Once for each.",
    multiple=True,
    default=("multiturn",),
    metavar="NAME|FILE|MIX",
)
@option(
    "--policy policies",
    "What is compared; all: every policy.",
    _listed("names with commas between them", str),
    multiple=True,
    default=("preble,round_robin,least_load,sglang_cache_aware",),
    metavar="NAME,...",
)
@option(
    "--chunk chunks",
    "Run every policy with each of these --max-batch-tokens (docs/howto/engine-chunk.md).",
    _listed("whole numbers with commas between them", int),
    show_default=False,
    default=(),
    metavar="N,...",
)
@option(
    "--rps rates",
    "Requests a second on average. quick: --load times about what no policy can sustain. auto: search each "
    "policy's capacity, then run all at --load times the best one. recorded: as the trace has it.",
    _listed(f"{QUICK}, {SEARCHED}, {RECORDED}, or numbers with commas between them", _rate),
    multiple=True,
    default=(QUICK,),
    metavar="N,...",
)
@option(
    "--load loads",
    "The rates to compare at, with --rps quick as shares of what no policy can sustain, with --rps auto of the best "
    "policy's capacity.  [default: 0.3,0.6; with --rps auto 0.8]",
    _listed("numbers with commas between them", float),
    default=(),
    show_default=False,
    metavar="X,...",
)
@option(
    "--seed seeds",
    "Each is a repetition with other requests and arrivals; intervals come from several.",
    _listed("whole numbers with commas between them", int),
    multiple=True,
    default=("0",),
    metavar="N,...",
)
@workload_shape_options("as many as come in --lasting-s")
@option(
    "--lasting-s",
    "Seconds for which requests arrive at each rate; a run ends earlier once it is clear whether it settles.  "
    f"[default: {QUICK_WINDOWS:g} times --window-s with --rps quick, else {LASTING_WINDOWS} times; --requests goes "
    "first]",
    POSITIVE_FLOAT,
)
@cluster_options
@option(
    "--slo-ttft ttft_p99_s",
    "Bound on the p99 of TTFT, in seconds, for all workloads or one.  [default: 2, unless --slo-e2e is given]",
    _BOUND,
    multiple=True,
    metavar="[WORKLOAD=]S",
)
@option(
    "--slo-e2e e2e_mean_s",
    "Bound on the mean E2E, in seconds, for all workloads or one.",
    _BOUND,
    multiple=True,
    metavar="[WORKLOAD=]S",
)
@option(
    "--ttft-target ttft_targets",
    "Requests ask for their first token within S seconds; all, or those of one part of a mix or stream of a "
    "scenario. Every policy then also runs promising it, and goodput is compared.",
    _BOUND,
    multiple=True,
    metavar="[CLASS=]S",
)
@option(
    "--tpot-target tpot_targets",
    "Requests ask for each further token within S seconds.",
    _BOUND,
    multiple=True,
    metavar="[CLASS=]S",
)
@option("--jobs", "Simulations at once.  [default: one a core]", POSITIVE)
@json_option(
    f"the result with every run, after each of them, which otherwise goes to {KEPT} (runs that the file has "
    "already are not made again)"
)
@option("--html", "Write a page with figures (needs the extra `plot`).", DRAWN_FILE)
def command(json_file: Path | None, html: Path | None, jobs: int | None, **options: Any) -> None:
    """Run workloads at several rates under several policies on simulated clusters, and rank the policies by capacity:
    the highest rate that keeps the SLO in the long run: neither queues nor misses grow.

    Without options it takes about a minute on two cores: conversations at two rates, with one seed. --rps auto searches
    each policy's capacity, which takes ten times as long. Several seeds say how sure the ranking is. The same command
    goes on where it was interrupted, and policies, workloads, rates and seeds can be added.

    \b
    Examples:
      preble compare
      preble compare --workload toolbench --rps auto --seed 0,1,2 --load 0.5,0.8,0.95 --html page.html
      preble compare --workload toolbench:7+longdoc:3 --rps 10 --ttft-target 0.5 --ttft-target longdoc=60
      preble compare --workload trace.jsonl.gz --policy all --rps 5,10,20 --seed 0,1,2,3,4 --json result.json
      preble compare --policy e2,least_load --rps 10 --fail 30:lost:r1 --json - \\
          | jq '.runs[] | {policy, seed: .workload.seed, ttft: .summary.ttft.p99_s, failed: .summary.errors}'
    """
    from preble.lab.compare import compare_policies
    from preble.lab.report.progress import progress

    plan = _plan(**options)
    to_stdout = json_file == STDOUT
    path = _kept() if json_file is None or to_stdout else json_file
    try:
        with progress("compare", "runs") as on_progress:
            result = compare_policies(plan, path=path, jobs=jobs, on_progress=on_progress)
    except KeyboardInterrupt:
        kept = f"what was done is in {path}; the same command goes on from there" if path else "nothing was kept"
        click.echo(f"preble: interrupted; {kept}", err=True)
        raise click.exceptions.Exit(INTERRUPTED_STATUS) from None
    _deliver(result, html, to_stdout=to_stdout)


def _kept() -> Path | None:
    """Return the file for runs if nobody names one, begun anew where it is of no use; None: it cannot be written."""
    from preble.lab.compare.result import read_result

    try:
        KEPT.parent.mkdir(exist_ok=True)
        if KEPT.exists() and KEPT.stat().st_size > MOST_KEPT_BYTES:
            KEPT.unlink()
        if KEPT.exists():
            read_result(KEPT)
    except ConfigError:  # of another version
        KEPT.unlink()
    except OSError:
        return None
    return KEPT if os.access(KEPT.parent, os.W_OK) else None


def _plan(
    *,
    sources: tuple[str, ...],
    requests: int | None,
    policies: tuple[tuple[str, ...], ...],
    chunks: tuple[int, ...],
    rates: tuple[tuple[float | str | None, ...], ...],
    loads: tuple[float, ...],
    seeds: tuple[tuple[int, ...], ...],
    ttft_p99_s: tuple[tuple[str, float], ...],
    e2e_mean_s: tuple[tuple[str, float], ...],
    ttft_targets: tuple[tuple[str, float], ...],
    tpot_targets: tuple[tuple[str, float], ...],
    lasting_s: float | None,
    **rest: Any,
) -> ComparePlan:
    """Return what is compared, from the values of the options."""
    from preble.core.policies.registry import policy_names
    from preble.core.types import Target
    from preble.lab.compare import ComparePlan
    from preble.lab.metrics.capacity import CapacitySlo

    names = tuple(name for listed in policies for name in (policy_names() if listed == (EVERY,) else listed))
    asked = tuple(rate for listed in rates for rate in listed)
    if len(asked) > 1 and {QUICK, SEARCHED}.intersection(asked):
        raise ConfigError(f"--rps: either {QUICK}, {SEARCHED} or rates, not both")
    ttft, e2e = dict(ttft_p99_s), dict(e2e_mean_s)
    if "" not in ttft and "" not in e2e:
        ttft[""] = DEFAULT_TTFT_S
    soon, fast = dict(ttft_targets), dict(tpot_targets)
    workloads: dict[str, WorkloadPlan] = {}
    for source in dict.fromkeys(sources):
        workloads[_label(source, workloads)], of_cluster = workload_plan(source, requests, RECORDED_REQUESTS, **rest)
    if lasting_s is None and requests is None:
        lasting_s = (QUICK_WINDOWS if QUICK in asked else LASTING_WINDOWS) * rest["window_s"]
    return ComparePlan(
        workloads=workloads,
        policies=names,
        chunks=chunks,
        cluster=simulated_cluster(**of_cluster),
        seeds=tuple(seed for listed in seeds for seed in listed),
        rates=tuple(rate for rate in asked if not isinstance(rate, str)),
        loads=loads or (QUICK_LOADS if QUICK in asked else SEARCHED_LOADS),
        search=QUICK not in asked,
        lasting_s=lasting_s,
        slo=CapacitySlo(ttft.get(""), e2e.get("")),
        slos={
            label: CapacitySlo(ttft.get(label, ttft.get("")), e2e.get(label, e2e.get("")))
            for label in dict.fromkeys((*ttft, *e2e))
            if label
        },
        targets={
            name: Target(soon.get(name, soon.get("")), fast.get(name, fast.get("")))
            for name in dict.fromkeys((*soon, *fast))
        },
    )


def _label(source: str, taken: Mapping[str, Any]) -> str:
    """Return a short name for a workload in tables: of a file its name, unless another one has that."""
    path = Path(source)
    short = path.name.partition(".")[0] if path.is_file() else source
    return source if short in taken else short


def _deliver(result: CompareResult, html: Path | None, *, to_stdout: bool) -> None:
    from preble.lab.compare.numbers import caution

    if to_stdout:
        write_json(STDOUT, result)
    else:
        _show(result)
    if not (result.plan.rates or result.plan.search):
        click.echo(
            f"preble: capacities are coarse, from so few rates; --rps {SEARCHED} searches each policy's", err=True
        )
    for workload in result.plan.workloads:
        if warning := caution(result, workload):
            click.echo(f"preble: {warning}", err=True)
    if html is not None:
        from preble.lab.compare.page import compare_page

        write_result(html, compare_page(result, made=made_by()).encode())


def _show(result: CompareResult) -> None:
    """Show every workload's ranking, of several an overview, and what the columns mean."""
    from rich.console import Console

    from preble.lab.compare.numbers import DEFINITIONS, GOODPUT_DEFINITIONS, shown_rates
    from preble.lab.compare.tables import goodput_table, overview_table, terminal_table
    from preble.lab.report import print_tables

    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    tables = [terminal_table(result, workload) for workload in result.plan.workloads]
    if len(tables) > 1:
        tables.append(overview_table(result))
    print_tables(console, *tables)
    if result.plan.targets:
        for workload in result.plan.workloads:
            print_tables(console, *(goodput_table(result, workload, rps) for rps in shown_rates(result, workload)))
        console.print(GOODPUT_DEFINITIONS, highlight=False)
    console.print(DEFINITIONS, highlight=False)
