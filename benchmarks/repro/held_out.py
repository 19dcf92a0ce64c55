"""Two recorded traces that nobody tuned the default policy to: one look at each, whatever it shows.

    PREBLE_DATA=data python benchmarks/repro/held_out.py      # a quarter of an hour, core compiled; goes on
    python benchmarks/repro/held_out.py --seeds 1             # the first seed alone; more can follow
    python benchmarks/repro/held_out.py --draw                # fill in the page from the results

The traces are public. Put them into `traces/` of the folder that PREBLE_DATA names:

- azure2023_conv.csv.gz: AzureLLMInferenceTrace_conv.csv of https://github.com/Azure/AzurePublicDataset (data/),
  compressed with gzip.
- mooncake_conversation_0-30min.jsonl.gz: the first 5,719 lines of FAST25-release/traces/conversation_trace.jsonl of
  https://github.com/kvcache-ai/Mooncake, compressed with gzip. Other names for its blocks change no result.

Each seed takes another stretch of the trace, its requests in the recorded order: what is asked again comes after as
many other requests as it did. Their times are drawn (Poisson) at the wanted rate, for Mooncake's are rounded to three
seconds. The rates are parts of the highest capacity that the likely best policies have with the first seed on four
replicas, and four times that on sixteen.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

import msgspec
from made_by import begin, note
from page import EVALUATION, NOT_RUN, filled, markdown

from preble.lab.compare import ComparePlan, CompareResult, compare_policies, read_result
from preble.lab.compare.numbers import E2E_MEAN, E2E_P99, TTFT_MEAN, TTFT_P99, Number, settling
from preble.lab.compare.result import Run, write_result
from preble.lab.metrics.capacity import CapacitySlo
from preble.lab.report import Table
from preble.lab.report.progress import progress
from preble.lab.sim import SimConfig
from preble.lab.workloads import WorkloadPlan
from preble.profiles import load_profile

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "held_out"
_, PAGE = EVALUATION
TRACES = Path(os.environ.get("PREBLE_DATA", "data")) / "traces"
OWN, BASE = "preble", "least_load"
POLICIES = (OWN, "sticky_until_saturated", "slim_router", "sglang_cache_aware", "lmetric", "e2", BASE, "round_robin")
LIKELY_BEST = (OWN, "sticky_until_saturated", BASE)
"""Whose capacity is searched, to know at which rates all run."""
LOADS = (0.6, 0.8)
SEEDS = (40, 41, 42)
SHOWN = (TTFT_MEAN, TTFT_P99, E2E_MEAN, E2E_P99)


@dataclass(frozen=True, slots=True)
class Case:
    """One trace on one cluster. `requests`: a run of them at the capacity lasts longer than the policy's window."""

    name: str
    title: str
    trace: str
    requests: int
    replicas: int
    profile: str
    block_size: int
    ttft_s: float

    def plan(self, policies: tuple[str, ...], seeds: tuple[int, ...], rates: tuple[float, ...] = ()) -> ComparePlan:
        """`rates`: none to search the capacity."""
        cluster = SimConfig(profile=load_profile(self.profile), replicas=self.replicas, block_size=self.block_size)
        return ComparePlan(
            workloads={self.name: WorkloadPlan(source=str(TRACES / self.trace), requests=self.requests)},
            policies=policies,
            cluster=cluster,
            seeds=seeds,
            rates=rates,
            loads=LOADS,
            slo=CapacitySlo(ttft_p99_s=self.ttft_s),
        )

    @property
    def path(self) -> Path:
        return RESULTS / f"{self.name}.json"

    @property
    def search_path(self) -> Path:
        return RESULTS / f"{self.name}.capacity.json"


def _azure(replicas: int, requests: int) -> Case:
    title = f"Azure's conversations, {replicas} x A6000"
    return Case(
        f"azure-{replicas}", title, "azure2023_conv.csv.gz", requests, replicas, "a6000-mistral-7b", 64, ttft_s=2.0
    )


def _mooncake(replicas: int, requests: int) -> Case:
    """Blocks as large as the trace's, which says no more than whether a whole one is the same."""
    title = f"Mooncake's conversations, {replicas} x A100"
    trace = "mooncake_conversation_0-30min.jsonl.gz"
    return Case(f"mooncake-{replicas}", title, trace, requests, replicas, "a100-mistral-7b", 512, ttft_s=30.0)


_CASES = (_mooncake(4, 1200), _azure(4, 4000), _mooncake(16, 3000), _azure(16, 10_400))
CASES: Mapping[str, Case] = MappingProxyType({case.name: case for case in _CASES})


def run(case: Case, seeds: tuple[int, ...] = SEEDS) -> None:
    """Search the likely best policies' capacity on four replicas, then run all of them at parts of the highest."""
    four = next(other for other in CASES.values() if other.trace == case.trace and other.replicas == 4)
    found = _compared(four.plan(LIKELY_BEST, SEEDS[:1]), four.search_path)
    best = max(one.capacity_rps.mean for one in found.standings) * case.replicas / four.replicas
    rates = tuple(float(f"{load * best:.3g}") for load in LOADS)
    _compared(case.plan(POLICIES, seeds, rates), case.path)


def _compared(plan: ComparePlan, path: Path) -> CompareResult:
    print(f"{path.stem}: {', '.join(plan.policies)}", file=sys.stderr, flush=True)
    with progress("compare", "runs") as on_progress:
        result = compare_policies(plan, path=path, jobs=1, on_progress=on_progress)
    result = msgspec.structs.replace(result, other_runs=[])
    write_result(result, path)
    return result


def known_results() -> dict[str, CompareResult]:
    """The results that are complete, by the name of their case."""
    found = {name: read_result(case.path) for name, case in CASES.items() if case.path.exists()}
    return {name: result for name, result in found.items() if result.is_complete}


def tables(results: Mapping[str, CompareResult]) -> dict[str, Table | None]:
    """The page's table by the name of its markers; None without results."""
    if not results:
        return {"held-out": None}
    rows = [row for name, result in results.items() for row in _rows(CASES[name], result)]
    others = [policy for policy in POLICIES if policy != OWN]
    seeds = "; ".join(f"{CASES[name].title}: {len(result.plan.seeds)}" for name, result in results.items())
    missing = "; ".join(case.title for name, case in CASES.items() if name not in results) or "nothing"
    caption = (
        f"{' / '.join(number.name for number in SHOWN)}: {OWN}'s in seconds, the others' as multiples of them, seed by "
        f"seed; above 1 is slower than {OWN}. Seeds, each another stretch of the trace: {seeds}. "
        f"Not run yet: {missing}."
    )
    return {"held-out": Table(("trace and replicas", "rate, /s", OWN, *others), rows, caption=caption)}


def values(results: Mapping[str, CompareResult]) -> dict[str, str]:
    """The numbers that sentences of the page quote, by the name of their markers."""
    places = [(name, rate) for name, result in results.items() for rate in result.plan.rates]
    if not places:
        return {}
    ratios = {place: {policy: _ratios(results[place[0]], *place, policy) for policy in POLICIES} for place in places}
    behind = [1 / min(of_it[policy][0] for policy in POLICIES) for of_it in ratios.values()]
    over_base = [max(1 / of_it[BASE][2], 1 / of_it[BASE][3]) for of_it in ratios.values()]
    return {
        "value:held-out-places": str(len(places)),
        "value:held-out-first": str(sum(share <= 1.0 for share in behind)),
        "value:held-out-near": str(sum(share <= 1.1 for share in behind)),
        "value:held-out-worst": f"{max(behind):.2f}",
        "value:held-out-base": f"{max(over_base):.2f}",
    }


def _rows(case: Case, result: CompareResult) -> Iterator[tuple[str, ...]]:
    for rate, load in zip(result.plan.rates, LOADS, strict=True):
        own = _runs(result, case.name, rate, OWN)
        cells = [" / ".join(number.cell(own, with_interval=False) for number in SHOWN) + _settles(own)]
        for policy in POLICIES[1:]:
            ratios = _ratios(result, case.name, rate, policy)
            text = " / ".join(f"{ratio:.2f}" for ratio in ratios)
            cells.append(text + _settles(_runs(result, case.name, rate, policy)))
        yield (case.title, f"{rate:g} ({load:.0%})", *cells)


def _settles(runs: list[Run]) -> str:
    state = settling(runs).partition(" (")[0]
    return "" if state == "steady" else f", {state}"


def _runs(result: CompareResult, name: str, rate: float | None, policy: str) -> list[Run]:
    return result.runs_of(name, policy)[rate or 0.0]


def _ratios(result: CompareResult, name: str, rate: float | None, policy: str) -> list[float]:
    """The policy's numbers over those of `preble` on the same requests, the mean over the seeds."""
    pairs = list(zip(_runs(result, name, rate, policy), _runs(result, name, rate, OWN), strict=True))
    return [fmean(_value(number, run) / _value(number, own) for run, own in pairs) for number in SHOWN]


def _value(number: Number, of: Run) -> float:
    value = number.of(of)
    assert value is not None, "a run of a trace serves requests"
    return value


def draw_page() -> None:
    results = known_results()
    made = {name: NOT_RUN if table is None else markdown(table) for name, table in tables(results).items()}
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), made | values(results)), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="BEGINNING", help="cases whose names begin so")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many, from the first on")
    parser.add_argument("--draw", action="store_true", help="only fill in what is there")
    options = parser.parse_args()
    if not options.draw:
        begin("held_out", *(path for case in CASES.values() for path in (case.path, case.search_path)))
    for name, case in CASES.items():
        if name.startswith(options.only) and not options.draw:
            run(case, SEEDS[: options.seeds])
    if not options.draw and not options.only:
        note("held_out")
    draw_page()


if __name__ == "__main__":
    main()
