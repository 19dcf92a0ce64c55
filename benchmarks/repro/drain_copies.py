"""What copies gain when a replica drains or joins, against `preble` without copies (docs/concepts/copies.md).

    python benchmarks/repro/drain_copies.py          # minutes; what is kept already is not run again
    python benchmarks/repro/drain_copies.py --draw   # fill in the page from the results that are there

The same requests with and without links between the replicas, in turns. A replica drains for half a minute and is gone
then; or one joins. Results: benchmarks/results/drain_copies.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from cases import Kept, change, play_and_draw
from page import fill

from preble.core.types import Placement
from preble.lab.metrics import RequestRecord
from preble.lab.metrics.summary import percentile
from preble.lab.sim import Failure, FailureKind, SimConfig, SimLinks, Simulation
from preble.lab.sim.memory import fewer_collections
from preble.lab.workloads import Workload, WorkloadPlan
from preble.profiles import load_profile, with_kv_size

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "copies.md"
SEEDS = (10, 11, 12, 13, 14, 15)
LINK_GB_PER_S = 12.5
CHANGE_S, LASTS_S = 30.0, 30.0
"""When the replica drains or joins, and how long afterwards requests count. Then the drained one is gone."""
DRAIN = (Failure(CHANGE_S, FailureKind.DRAINED, "r0"), Failure(CHANGE_S + LASTS_S, FailureKind.LOST, "r0"))
JOIN = (Failure(CHANGE_S, FailureKind.ADDED, "new"),)


@dataclass(frozen=True)
class Case:
    """One workload at one rate, while a replica drains or joins."""

    source: str
    requests: int
    rps: float
    replicas: int
    failures: tuple[Failure, ...]
    options: Mapping[str, object] = field(default_factory=dict)
    profile: str = "a6000-mistral-7b"


CASES: Mapping[str, Case] = {
    "conversations, one of 4 drains": Case("multiturn", 2400, 30, 4, DRAIN),
    "conversations with 20 assistants, one of 4 drains": Case("multiturn", 2400, 30, 4, DRAIN, {"num_prefixes": 20}),
    "conversations, 70B, one of 4 drains": Case("multiturn", 2400, 30, 4, DRAIN, profile="h100x2-llama-3-70b"),
    "conversations, a fourth joins": Case("multiturn", 2400, 30, 3, JOIN),
    "tool use, a fourth joins": Case("toolbench", 2400, 30, 3, JOIN),
}


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run: of the requests that count, `num_requests` with `prompt` tokens, `computed` of them computed.

    They are each drained session's first request afterwards, or those on the new replica. `copied`: tokens that were
    copied for them. `ttft_p99_s`, `e2e_mean_s`: of all requests of that time.
    """

    case: str
    copies: bool
    seed: int
    num_requests: int
    prompt: int
    computed: int
    copied: int
    ttft_p99_s: float
    e2e_mean_s: float

    @property
    def key(self) -> tuple[str, bool, int]:
        return self.case, self.copies, self.seed


def measure(name: str, copies: bool, seed: int) -> Measured:
    case = CASES[name]
    plan = WorkloadPlan(source=case.source, requests=case.requests, rps=case.rps, seed=seed, **case.options)  # type: ignore[arg-type]
    workload = plan.make()
    config = SimConfig(
        profile=with_kv_size(load_profile(case.profile)),
        replicas=case.replicas,
        seed=seed,
        failures=case.failures,
        links=SimLinks(bytes_per_s=LINK_GB_PER_S * 1e9) if copies else None,
    )
    copied: dict[str, int] = {}

    def note_copy(placement: Placement, now: float) -> None:
        copied[placement.request_id] = placement.transfer.tokens if placement.transfer is not None else 0

    with fewer_collections():
        result = Simulation(config, workload, on_placement=note_copy).run()
    records = {record.request_id: record for record in result.records}
    then = [record for record in result.records if CHANGE_S <= record.scheduled_s < CHANGE_S + LASTS_S]
    of_drained = first_requests_of_drained(workload, records)
    counted = of_drained if case.failures is DRAIN else [record for record in then if record.replica == "new"]
    return Measured(
        case=name,
        copies=copies,
        seed=seed,
        num_requests=len(counted),
        prompt=sum(record.prompt_tokens for record in counted),
        computed=sum(record.prompt_tokens - (record.cached_tokens or 0) for record in counted),
        copied=sum(copied[record.request_id] for record in counted),
        ttft_p99_s=percentile(sorted(record.ttft_s for record in then if record.ttft_s is not None), 99),
        e2e_mean_s=sum(record.end_s - record.scheduled_s for record in then) / len(then),
    )


def first_requests_of_drained(workload: Workload, records: Mapping[str, RequestRecord]) -> list[RequestRecord]:
    """Return, of each session whose last request had been on the drained replica, the first one while it drains."""
    found = []
    for session in workload.sessions():
        of_one = [records[request.request_id] for request in session if request.request_id in records]
        before = [record for record in of_one if record.scheduled_s < CHANGE_S]
        after = [record for record in of_one if CHANGE_S <= record.scheduled_s < CHANGE_S + LASTS_S]
        if before and after and before[-1].replica == "r0":
            found.append(after[0])
    return found


KEPT = Kept(
    "drain_copies",
    Measured,
    lambda one: ([*CASES].index(one.case), one.seed, one.copies),
    str,
)


def table(found: Mapping[tuple[str, bool, int], Measured]) -> str:
    """Markdown: for each case, what is computed without and with copies, and the changes of times."""
    rows = [
        "| what happens | requests | computed, no copies | computed, copies | change | copied | TTFT p99 | E2E mean |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, case in CASES.items():
        without = [found[name, False, seed] for seed in SEEDS]
        with_copies = [found[name, True, seed] for seed in SEEDS]
        shares = [sum(o.computed for o in ones) / sum(o.prompt for o in ones) for ones in (without, with_copies)]
        rows.append(
            f"| {name}, {case.rps:g} requests/s | {sum(one.num_requests for one in without)} | {shares[0]:.0%} "
            f"| {shares[1]:.0%} "
            f"| {change(*([one.computed / one.prompt for one in ones] for ones in (with_copies, without)))} "
            f"| {sum(one.copied for one in with_copies) / sum(one.prompt for one in with_copies):.0%} "
            f"| {change(*([one.ttft_p99_s for one in ones] for ones in (with_copies, without)))} "
            f"| {change(*([one.e2e_mean_s for one in ones] for ones in (with_copies, without)))} |"
        )
    return "\n".join(rows)


def play(names: list[str], seeds: tuple[int, ...], jobs: int) -> None:
    wanted = [(name, copies, seed) for name in names for seed in seeds for copies in (False, True)]
    KEPT.play(measure, wanted, jobs)


def draw() -> None:
    fill([PAGE], {"drain-copies": table(KEPT.known()) + "\n"})


if __name__ == "__main__":
    play_and_draw(__doc__, CASES, SEEDS, play, draw)
