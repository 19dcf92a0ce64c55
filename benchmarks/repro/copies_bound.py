"""Why copies gain no more on video: what other replicas hold, and what it would bring if that cost nothing.

    python benchmarks/repro/copies_bound.py          # minutes with the compiled core; what is kept is not run again
    python benchmarks/repro/copies_bound.py --draw   # fill in the page from the results that are there

Three runs of the same requests: without links; without links on replicas that compute faster, by the share of the
missed tokens that another replica held when its request was placed, as if these took no time and no room in a cache;
and with links of 12.5 GB/s. Results: benchmarks/results/copies_bound.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
from cases import Kept, change, play_and_draw
from copies import CASES, FAST, PAGE
from page import fill

from preble.core.costs.refit import CostFactors, scaled
from preble.core.types import Placement
from preble.lab.metrics.steady import steadiness
from preble.lab.sim import SimConfig, SimLinks, Simulation
from preble.lab.sim.memory import fewer_collections
from preble.lab.workloads import WorkloadPlan
from preble.profiles import load_profile, with_kv_size

NAMES = {"video": CASES["video"]}
SEEDS = tuple(range(10, 22))


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one seed. E2E in seconds, on average. Of the tokens that the chosen replicas lacked: `elsewhere`, the
    share that another one held, without links; `copied`, the share that was copied, with links.
    """

    case: str
    seed: int
    e2e_s: float
    free_e2e_s: float
    linked_e2e_s: float
    elsewhere: float
    copied: float

    @property
    def key(self) -> tuple[str, int]:
        return self.case, self.seed


def run(name: str, seed: int, *, prefill: float = 1.0, links: SimLinks | None = None) -> tuple[float, float, float]:
    """Return the mean E2E, and the shares held elsewhere and copied. `prefill`: a factor of prefill times."""
    case, count = CASES[name], Counter[str]()
    plan = WorkloadPlan(source=case.source, requests=case.requests, rps=case.rps, seed=seed, **case.options)  # type: ignore[arg-type]
    workload = plan.make()
    profile = scaled(with_kv_size(load_profile(case.profile)), CostFactors(prefill=prefill))
    config = SimConfig(profile=profile, replicas=case.replicas, seed=seed, links=links)

    def on_placement(placement: Placement, now: float) -> None:
        copied = placement.transfer.tokens if placement.transfer is not None else 0
        here = placement.matched_tokens - copied
        held = max(one.matched_tokens - one.copied_tokens for one in placement.candidates)
        count.update(elsewhere=max(held - here, 0), copied=copied, here=here)

    with fewer_collections():
        result = Simulation(config, workload, on_placement=on_placement).run()
    steady = steadiness(result.records, until_s=max(request.arrival_s or 0.0 for request in workload.openers))
    missed = sum(record.prompt_tokens for record in result.records) - count["here"]
    assert steady.summary.e2e is not None
    return steady.summary.e2e.mean_s, count["elsewhere"] / missed, count["copied"] / missed


def measure(name: str, seed: int) -> Bound:
    e2e_s, elsewhere, _ = run(name, seed)
    free_e2e_s, _, _ = run(name, seed, prefill=1.0 - elsewhere)
    linked_e2e_s, _, copied = run(name, seed, links=SimLinks(bytes_per_s=FAST * 1e9))
    return Bound(
        case=name,
        seed=seed,
        e2e_s=e2e_s,
        free_e2e_s=free_e2e_s,
        linked_e2e_s=linked_e2e_s,
        elsewhere=elsewhere,
        copied=copied,
    )


KEPT = Kept("copies_bound", Bound, lambda one: one.key, str)


def table(found: Mapping[tuple[str, int], Bound]) -> str:
    """Markdown: a row for each case."""
    rows = [
        "| workload, requests/s | held elsewhere | copied | E2E, copies | E2E, if it cost nothing | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for name, case in NAMES.items():
        ones = [found[name, seed] for seed in SEEDS if (name, seed) in found]
        without = [one.e2e_s for one in ones]
        rows.append(
            f"| {name}, {case.rps:g} | {_mean([one.elsewhere for one in ones]):.1%} "
            f"| {_mean([one.copied for one in ones]):.1%} "
            f"| {change([one.linked_e2e_s for one in ones], without)} "
            f"| {change([one.free_e2e_s for one in ones], without)} | {ones[0].seed} to {ones[-1].seed} |"
        )
    return "\n".join(rows)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def play(names: list[str], seeds: tuple[int, ...], jobs: int) -> None:
    KEPT.play(measure, [(name, seed) for seed in seeds for name in names], jobs)


def draw() -> None:
    fill([PAGE], {"copies-bound": table(KEPT.known()) + "\n"})


if __name__ == "__main__":
    play_and_draw(__doc__, NAMES, SEEDS, play, draw)
