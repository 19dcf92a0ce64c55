"""The evaluation in docs/evaluation.md: the paper's figures, every peer's rule, and the cases that do harm.

    python benchmarks/repro/evaluation.py                      # what is not there yet (an hour on two cores)
    python benchmarks/repro/evaluation.py toolbench video      # these cases
    python benchmarks/repro/evaluation.py --list
    python benchmarks/repro/evaluation.py --draw               # fill in the page from the results that are there

A case is a comparison as `preble compare` makes it; each has a file in benchmarks/results/evaluation/, and what is
interrupted goes on where it was. Cases of real traces need them in the folder named by PREBLE_DATA. To draw, the extra
`plot` is needed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from evaluation_cases import CASES, Case
from page import NOT_RUN, filled, markdown

from preble.bench.compare import CompareResult, Run, compare, read_result
from preble.bench.compare.figures import capacity_drawing, curve_drawing
from preble.bench.compare.numbers import E2E_MEAN, E2E_P99, LATENCIES, TTFT_P99, Number, caution
from preble.bench.compare.plan import BASELINE
from preble.bench.compare.progress import run_progress
from preble.bench.compare.tables import ranking_table
from preble.report import Table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "evaluation"
PAGE = ROOT / "docs" / "evaluation.md"
FIGURES = ROOT / "docs" / "evaluation"


def result_path(case: Case) -> Path:
    return RESULTS / f"{case.name}.json"


def latency_table(result: CompareResult, workload: str) -> Table:
    """Mean and p99 at each rate as multiples of those of `preble`, or of the first policy where that was not run."""
    policies = [standing.policy for standing in result.standings_of(workload)]
    own = "preble" if "preble" in policies else policies[0]
    runs = {policy: result.runs_of(workload, policy) for policy in policies}
    rates = sorted(set.intersection(*(set(of_policy) for of_policy in runs.values())))
    shown = [(rate, number) for rate in rates for number in (E2E_MEAN, TTFT_P99)]

    def cell(policy: str, rate: float, number: Number) -> str:
        ours = _mean(number, runs[own][rate])
        return f"{ours:.3g} s" if policy == own else f"{_mean(number, runs[policy][rate]) / ours:.2f}"

    return Table(
        ("policy", *(f"{number.name} at {rate:g}/s" for rate, number in shown)),
        [(policy, *(cell(policy, rate, number) for rate, number in shown)) for policy in policies],
        caption=f"`{own}` in seconds, the others as multiples of it: above 1 is slower.",
    )


def paper_table(results: dict[str, CompareResult]) -> Table:
    """The ratio to round robin at the highest rate that the better one still carries, beside the paper's."""
    rows = []
    for case in CASES.values():
        if case.paper and (result := results.get(case.name)) is not None:
            rows += [
                (case.title, policy, *ratios(result, case.workload, policy), case.paper) for policy in ("e2", "preble")
            ]
    return Table(
        ("case", "policy", "rate, /s", "mean E2E", "p99 E2E", "the paper: mean, p99"),
        rows,
        caption="Round robin's latency divided by the policy's, at the rate where the mean ratio is largest among "
        "those at which the policy keeps the SLO.",
    )


def ratios(result: CompareResult, workload: str, policy: str) -> tuple[str, str, str]:
    """Where round robin's mean E2E is the largest multiple of the policy's: the rate, the ratios of mean and p99."""
    own, other = (result.runs_of(workload, name) for name in (policy, "round_robin"))
    slo = result.plan.slo_of(workload)
    kept = [rate for rate, runs in own.items() if all(slo.is_met_by(run.summary) for run in runs)] or [min(own)]
    found = {rate: [_mean(n, other[rate]) / _mean(n, own[rate]) for n in (E2E_MEAN, E2E_P99)] for rate in kept}
    rate = max(found, key=lambda rate: found[rate][0])
    mean, p99 = found[rate]
    return f"{rate:g}", f"{mean:.2f}", f"{p99:.2f}"


def _mean(number: Number, runs: Sequence[Run]) -> float:
    """Over the seeds; infinite where a run has no such thing."""
    found = number.over(runs)
    return math.inf if found is None else found.mean


def overview_table(results: dict[str, CompareResult], group: str) -> Table:
    """Capacity as a share of the best policy's on the same case."""
    cases = [case for case in CASES.values() if case.group == group and case.name in results]
    shares: dict[str, dict[str, float]] = {}
    worse: set[tuple[str, str]] = set()
    for case in cases:
        for standing in results[case.name].standings_of(case.workload):
            shares.setdefault(standing.policy, {})[case.name] = standing.share_of_best
            if standing.is_worse and standing.policy != BASELINE:
                worse.add((standing.policy, case.name))

    def cell(policy: str, case: Case) -> str:
        share = shares[policy].get(case.name)
        return "-" if share is None else f"{'▼ ' if (policy, case.name) in worse else ''}{share:.0%}"

    order = sorted(shares, key=lambda policy: -sum(shares[policy].values()) / len(shares[policy]))
    return Table(
        ("policy", *(case.title for case in cases), "worst"),
        [(policy, *(cell(policy, case) for case in cases), f"{min(shares[policy].values()):.0%}") for policy in order],
        caption=f"Capacity at the SLO as a share of the best policy's. ▼: less than `{BASELINE}`.",
    )


def tables(results: dict[str, CompareResult]) -> dict[str, str]:
    """What stands between the markers of the page, by name."""
    made = {f"{name}-{what}": NOT_RUN for name in CASES for what in ("capacity", "latency")}
    made |= {f"overview-{case.group}": NOT_RUN for case in CASES.values()}
    made["paper"] = markdown(paper_table(results))
    for group in sorted({case.group for case in CASES.values()}):
        if any(case.group == group and case.name in results for case in CASES.values()):
            made[f"overview-{group}"] = markdown(overview_table(results, group))
    for name, result in results.items():
        workload = CASES[name].workload
        warning = caution(result, workload)
        made[f"{name}-capacity"] = markdown(ranking_table(result, workload)) + (f"\n{warning}\n" if warning else "")
        made[f"{name}-latency"] = markdown(latency_table(result, workload))
    return made


def draw(results: dict[str, CompareResult]) -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        workload = CASES[name].workload
        drawings = {"capacity": capacity_drawing(result, workload)}
        drawings |= {
            number.name.replace(" ", "-").lower(): curve_drawing(result, workload, number) for number in LATENCIES
        }
        for what, drawing in drawings.items():
            (FIGURES / f"{name}-{what}.svg").write_text(drawing.standalone(), encoding="utf-8")


def known_results() -> dict[str, CompareResult]:
    found = {case.name: result_path(case) for case in CASES.values()}
    return {name: read_result(path) for name, path in found.items() if path.exists()}


def run(case: Case) -> None:
    plan = case.plan(Path(os.environ.get("PREBLE_DATA", "data")))
    print(f"{case.name}: {case.title}", file=sys.stderr)
    with run_progress() as on_progress:
        compare(plan, path=result_path(case), on_progress=on_progress)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--list", action="store_true", help="the names of the cases")
    parser.add_argument("--draw", action="store_true", help="only fill in and draw what is there")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"there is no case {', '.join(sorted(unknown))}; --list shows them")
    if options.list:
        print(*(f"{case.name:24}{case.title}" for case in CASES.values()), sep="\n")
        return
    if not options.draw:
        for case in [CASES[name] for name in options.cases] or CASES.values():
            run(case)
    results = known_results()
    draw(results)
    if PAGE.exists():
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
