"""Who is first where: policies in steady state, over caches, populations, cluster sizes and rates, and in harm's way.

    python benchmarks/repro/grid.py                # the screen: few policies, one seed (half an hour on one core)
    python benchmarks/repro/grid.py --full         # then larger clusters, more seeds where it is close, more policies
    python benchmarks/repro/grid.py --only harm --full    # cells whose names begin so (half an hour, core compiled)
    python benchmarks/repro/grid.py --list
    python benchmarks/repro/grid.py --draw         # fill in the pages from the results that are there

Each cell is a comparison as `preble compare` makes it: every policy's capacity is searched, then all run at parts of
the best one's. Runs last three of the policy's windows and end early where it is clear what they say. Each cell has a
file in benchmarks/results/grid/; what was interrupted goes on where it was. To play a cell anew, remove its file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec
from evaluation_cases import CASES as EVALUATED
from evaluation_cases import DATA
from made_by import begin, note
from page import EVALUATION, EVALUATION_FIGURES, NOT_RUN, fill, markdown

from preble.core.costs.model import CostModel
from preble.lab.compare import ComparePlan, CompareResult, compare_policies, read_result
from preble.lab.compare.result import write_result
from preble.lab.metrics.capacity import CapacitySlo
from preble.lab.report.progress import progress
from preble.lab.sim import Failure, SimConfig
from preble.lab.workloads import Stream, WorkloadPlan
from preble.profiles import load_profile

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "grid"
FIGURE = EVALUATION_FIGURES / "map.svg"
PROFILE = load_profile("a6000-mistral-7b")
SCREEN = ("preble", "sticky_until_saturated", "least_load")
EVERYBODY = (*SCREEN, "slim_router", "e2", "sglang_cache_aware", "lmetric", "llmd_blend", "round_robin")
FOR_EVERYBODY = ("map-100-1-4", "map-1000-0.5-4-zipf1")
"""The squares on which all of them run, at `LOADS`: one for each popularity. All run in the cells of harm, too."""
SEEDS = (20, 21, 22)
CLOSE = 0.1
"""A cell gets more seeds where the second policy's capacity is within this of the first's: a step of the search."""
SCREEN_LOADS = (0.6, 0.8)
LOADS = (0.1, 0.3, 0.6, 0.8, 0.95)
LASTING_S = 540.0
"""Three windows of 180 s."""
SLO = CapacitySlo(ttft_p99_s=2.0)
PREFIX_TOKENS = 2048
BLOCK_TOKENS = 64
"""Four times vLLM's block: a simulation takes less than half as long, and what is cached differs by a few tokens."""
ROOM_TOKENS = 20_000
"""KV of a replica beside what is meant for prefixes: the requests that run need it."""
SCREEN_GROUPS = ("four", "harm")
GROUPS = ("map", "pure", "harm", "case")
"""How names of cells begin. Each group is a result of its own: one can be of today's policy without the others."""
WARM_LOAD = 0.6
"""How busy the replicas are in the warm-up, in which every prefix is computed once."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One comparison. `caches`: the prefixes that all caches hold together, as a share of the population; `replicas` of
    them hold all of it each. `rates`: instead of a search. `is_screen`: part of the screen."""

    name: str
    title: str
    workload: WorkloadPlan
    cluster: SimConfig
    rates: tuple[float, ...] = ()
    slo: CapacitySlo = SLO
    population: int = 0
    caches: float = 0.0
    is_screen: bool = True

    def plan(
        self, policies: tuple[str, ...], seeds: tuple[int, ...], loads: tuple[float, ...] = SCREEN_LOADS
    ) -> ComparePlan:
        return ComparePlan(
            workloads={self.name: self.workload},
            policies=policies,
            cluster=self.cluster,
            seeds=seeds,
            rates=self.rates,
            loads=loads,
            slo=self.slo,
            lasting_s=LASTING_S,
        )

    @property
    def path(self) -> Path:
        return RESULTS / f"{self.name}.json"

    @property
    def group(self) -> str:
        return self.name.partition("-")[0]

    @property
    def replicas(self) -> int:
        return self.cluster.replicas


def _stream_cell(
    name: str,
    title: str,
    streams: tuple[Stream, ...],
    replicas: int = 4,
    *,
    kv_tokens: int | None = None,
    cluster: Mapping[str, object] | None = None,
    **more: object,
) -> Cell:
    """A cell of streams, whose prefixes are all asked for once before anything counts."""
    warm_s = sum(stream.prefixes * CostModel(PROFILE).prefill_s(stream.prefix_tokens) for stream in streams)
    workload = WorkloadPlan(source=name, streams=streams, warm_s=round(warm_s / replicas / WARM_LOAD, 1))
    config = SimConfig(
        profile=PROFILE, replicas=replicas, kv_tokens=kv_tokens, block_size=BLOCK_TOKENS, **cluster or {}
    )  # type: ignore[arg-type]
    return Cell(name, title, workload, config, **more)  # type: ignore[arg-type]


def _asked(population: int, zipf: float = 0.0, **more: object) -> tuple[Stream, ...]:
    stream = Stream(prefixes=population, prefix_tokens=PREFIX_TOKENS, question_tokens=320, output_tokens=100, zipf=zipf)
    return (msgspec.structs.replace(stream, **more),)


def _map() -> Iterator[Cell]:
    """Caches x populations on four replicas, uniform and by Zipf's law; then clusters of other sizes."""

    def cell(population: int, caches: float, replicas: int = 4, zipf: float = 0.0, *, is_screen: bool = True) -> Cell:
        name = f"map-{population}-{caches:g}-{replicas}" + (f"-zipf{zipf:g}" if zipf else "")
        popularity = f", Zipf {zipf:g}" if zipf else ""
        title = f"{population:,} prefixes{popularity}, caches for {_share(caches, replicas)}, {replicas} replicas"
        kv_tokens = ROOM_TOKENS + round(caches * population * PREFIX_TOKENS / replicas)
        return _stream_cell(
            name,
            title,
            _asked(population, zipf),
            replicas,
            kv_tokens=kv_tokens,
            population=population,
            caches=caches,
            is_screen=is_screen,
        )

    for caches in (0.5, 1.0, 0.1, 4.0):
        for population in (100, 1000):
            yield cell(population, caches)
    yield cell(10, 4.0)
    for caches in (0.5, 0.1):
        yield cell(1000, caches, zipf=1.0)
    yield cell(50, 1.0, replicas=2)
    yield cell(50, 0.5, replicas=2)
    yield cell(400, 0.5, replicas=16)
    yield cell(400, 1.0, replicas=16, is_screen=False)
    yield cell(100, 0.5, zipf=1.0, is_screen=False)
    for caches in (1.0, 0.5, 0.1):
        yield cell(10_000, caches, is_screen=False)
    for replicas in (32, 128):
        for caches in (1.0, 0.5):
            yield cell(25 * replicas, caches, replicas=replicas, is_screen=False)


def _share(caches: float, replicas: int) -> str:
    return "all, each" if caches >= replicas else "all, together" if caches == 1 else f"{caches:.0%} of them"


def _harm() -> Iterator[Cell]:
    """What may harm a policy that knows caches; each at four fifths of what least load carries in steady state."""

    def cell(name: str, title: str, rate: float, *streams: Stream, **more: object) -> Cell:
        return _stream_cell(f"harm-{name}", title, streams, rates=(rate,), **{"kv_tokens": 60_000} | more)  # type: ignore[arg-type]

    usual = Stream(name="everyday", prefixes=100, question_tokens=200, output_tokens=40)
    few = msgspec.structs.replace(usual, prefixes=40, prefix_tokens=1500)
    yield cell(
        "answers",
        "answers that depend on the prefix",
        15.0,
        msgspec.structs.replace(few, output_tokens=10, long_every=10, long_output_tokens=2000),
        kv_tokens=None,
    )
    document = Stream(
        name="document", share=1.0, prefixes=1, prefix_tokens=30_000, from_s=200.0, until_s=260.0, output_tokens=20
    )
    yield cell(
        "new-document",
        "a new document asked by many at once",
        16.0,
        msgspec.structs.replace(usual, share=3.0),
        document,
        kv_tokens=None,
    )
    yield cell("flip", "popularity that flips every 10 s", 40.0, msgspec.structs.replace(few, zipf=1.5, flip_s=10.0))
    yield cell("drift", "popularity that drifts", 18.0, msgspec.structs.replace(usual, zipf=1.0, renew_s=120.0))
    flood = Stream(name="flood", share=6.0, prefixes=20, from_s=200.0, until_s=230.0, output_tokens=40)
    yield cell("flood", "a flood by one tenant", 12.0, usual, flood)
    yield cell(
        "long-outputs",
        "long outputs on short prompts",
        17.0,
        msgspec.structs.replace(usual, prefix_tokens=50, question_tokens=50, output_tokens=600),
    )
    yield cell("slow", "a replica half as fast", 9.6, usual, cluster={"speeds": {"r3": 0.5}})
    yield cell("small", "a replica with a quarter of the KV", 9.6, usual, cluster={"kv_shares": {"r3": 0.25}})
    joined = (Failure.parse("150:added:r4"), Failure.parse("300:restarted:r1"))
    yield cell("joins", "a cold replica that joins, another that restarts", 11.3, usual, cluster={"failures": joined})
    yield cell(
        "branches",
        "agents whose trees branch",
        30.0,
        msgspec.structs.replace(usual, prefixes=4, turns=4, branches=2, pause_s=0.5),
    )
    yield cell(
        "sizes",
        "50-token chats beside 100,000-token documents",
        9.0,
        Stream(name="chats", share=99.0, prefixes=1, prefix_tokens=20, question_tokens=30, output_tokens=100),
        Stream(name="documents", share=1.0, prefixes=4, prefix_tokens=100_000, output_tokens=20),
        kv_tokens=250_000,
    )
    yield cell("profile-x2", "a cost profile twice too slow", 11.3, usual, cluster={"profile_error": 2.0})
    yield cell("profile-half", "a cost profile twice too fast", 11.3, usual, cluster={"profile_error": 0.5})
    yield cell("late-100ms", "knowledge 100 ms late", 11.3, usual, cluster={"knowledge_delay_s": 0.1})
    yield cell("late-1s", "knowledge 1 s late", 11.3, usual, cluster={"knowledge_delay_s": 1.0})


def _purer() -> Iterator[Cell]:
    """The two cases in which the default policy once destroyed its own caches."""
    pure = Stream(prefixes=100, question_tokens=100, output_tokens=20)
    yield _stream_cell("pure", "100 prefixes, 60,000 KV tokens a replica", (pure,), kv_tokens=60_000, rates=(60.0,))


def _cases() -> Iterator[Cell]:
    """The paper's workloads, other sizes, GPUs and mixes."""
    for case in EVALUATED.values():
        plan = case.plan(DATA)
        [workload] = plan.workloads.values()
        yield Cell(
            f"case-{case.name}",
            case.full_title,
            msgspec.structs.replace(workload, requests=None),
            msgspec.structs.replace(plan.cluster, block_size=BLOCK_TOKENS),
            slo=plan.slo,
            is_screen=case.group in SCREEN_GROUPS,
        )


CELLS: Mapping[str, Cell] = MappingProxyType({cell.name: cell for cell in (*_map(), *_purer(), *_harm(), *_cases())})


def run(
    cell: Cell, policies: tuple[str, ...], seeds: tuple[int, ...], loads: tuple[float, ...] = SCREEN_LOADS
) -> CompareResult:
    print(f"{time.strftime('%H:%M:%S')} {cell.name}: {cell.title}", file=sys.stderr, flush=True)
    plan = cell.plan(policies, seeds, loads)
    with progress("compare", "runs") as on_progress:
        result = compare_policies(plan, path=cell.path, jobs=1, on_progress=on_progress)
    result = msgspec.structs.replace(result, other_runs=[])
    write_result(result, cell.path)
    return result


def is_close(result: CompareResult) -> bool:
    """Whether the second policy may well be the first."""
    shares = sorted((one.share_of_best for one in result.standings), reverse=True)
    return shares[1] > 1 - CLOSE


def screen(cells: Iterable[Cell]) -> None:
    """Every cell of the screen, with one seed."""
    for cell in cells:
        if cell.is_screen and not _done(cell):
            run(cell, SCREEN, SEEDS[:1])


def refine(cells: Iterable[Cell]) -> None:
    """What the screen left out: first the large ones, then more policies and, where it is close, more seeds."""
    cells = list(cells)
    for cell in cells:
        if not cell.is_screen and not _done(cell):
            run(cell, SCREEN, SEEDS[:1])
    for cell in cells:
        if cell.name in FOR_EVERYBODY or cell.group == "harm":
            run(cell, EVERYBODY, SEEDS, LOADS)
        elif cell.rates or is_close(read_result(cell.path)):
            run(cell, SCREEN, SEEDS)


def _done(cell: Cell) -> bool:
    return cell.path.exists() and read_result(cell.path).is_complete


def known_results() -> dict[str, CompareResult]:
    """The results that are complete, by the name of their cell."""
    return {name: read_result(cell.path) for name, cell in CELLS.items() if _done(cell)}


def draw_page() -> None:
    """Fill in the page's tables and draw the map."""
    from grid_page import map_drawing, tables, values

    results = known_results()
    made = {name: NOT_RUN if table is None else markdown(table) for name, table in tables(results).items()}
    made |= values(results)
    fill(EVALUATION, made)
    FIGURE.write_text(map_drawing(results).standalone(), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="BEGINNING", help="only cells whose names begin with this")
    parser.add_argument("--full", action="store_true", help="refine the results of the screen")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--draw", action="store_true", help="only fill in the page and draw from the kept results")
    options = parser.parse_args()
    cells = [cell for name, cell in CELLS.items() if name.startswith(options.only)]
    if options.list:
        print(*(f"{cell.name:24}{cell.title}" for cell in cells), sep="\n")
        return
    if not options.draw:
        for group in {cell.group for cell in cells}:
            begin(f"grid_{group}", *(cell.path for cell in CELLS.values() if cell.group == group))
        screen(cells)
        if options.full:
            refine(cells)
        note(*(f"grid_{group}" for group in GROUPS if group.startswith(options.only)))
    draw_page()


if __name__ == "__main__":
    main()
