"""Goodput where requests ask for a time to the first token: with targets, and by rules that do not know them.

    python benchmarks/repro/targets.py                    # half an hour on two cores, best on the compiled core
    python benchmarks/repro/targets.py --more             # only what the result has not yet
    python benchmarks/repro/targets.py --draw             # fill the page from the results that are there

Four A6000 with Mistral-7B, simulated. Seven of ten requests are of people, who want the first token soon; three are
batch work that may take a minute. Goodput: requests a second whose first token came in time; what is refused or fails
does not count. Rates are shares of what `preble` carries within its limit (benchmarks/results/gains.json). The first
fifth of each run warms up. `wrong_profile`: the scheduler's cost profile says 1.5 times too little; it is corrected
while serving, as in a gateway.
Result: benchmarks/results/targets.json. Page: docs/howto/targets.md.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby, product
from math import ceil, inf
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
from made_by import note
from page import fill

from preble.core.admission.admission import FairAdmission
from preble.core.admission.fair_queue import QueueSettings, TurnRefused
from preble.core.costs.model import CostModel
from preble.core.types import NO_TARGET, RequestId, Target
from preble.decisions.settings import make_scheduler
from preble.lab.metrics import RequestRecord
from preble.lab.sim import SimConfig, Simulation
from preble.lab.workloads import Workload, WorkloadRequest
from preble.lab.workloads.registry import make_workload
from preble.profiles import load_profile

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "targets.json"
PAGE = ROOT / "docs" / "howto" / "targets.md"
PROFILE = "a6000-mistral-7b"
CARRIED = {"toolbench": 71.1, "programming": 17.5, "video": 7.84, "longdoc": 4.81, "multiturn": 60.7}
"""Requests a second that `preble` carries within the limit of the evaluation."""
SHOWN = {
    "toolbench": "tool use",
    "programming": "programming",
    "video": "video",
    "longdoc": "long documents",
    "multiturn": "conversations",
}
PEOPLE_S = {"toolbench": 0.5, "programming": 0.5, "video": 5.0, "longdoc": 5.0, "multiturn": 0.5}
BATCH_S = 60.0
BATCH_SHARE = 0.3
SHARES = (0.8, 1.1, 1.5)
SEEDS = (10, 11)
LEAST_SECONDS, LEAST_REQUESTS = 60.0, 600
AS_TODAY = ("preble", "least_load", "llmd_blend")
"""Rules that know no target; everything is placed as it comes."""
WITH_TARGETS = ("preble in turns", "preble at once", "llmd_blend at once")
"""`in turns`: requests wait in the gateway, the urgent first. `at once`: only refused and placed by their targets, as
llm-d's rule of headroom does it."""
BY_DEADLINE = "preble by deadline"
"""Requests wait in the gateway, whose deadline is first goes first, and none is refused: deadlines alone."""


class Run(msgspec.Struct, frozen=True):
    """One run. `people`, `batch`: shares of the requests that got their first token in time; `admitted`: share of all
    that was not refused; `kept`: of those with a target that were admitted."""

    workload: str
    share: float
    how: str
    seed: int
    wrong_profile: bool
    goodput: float
    people: float
    batch: float
    admitted: float
    kept: float

    @property
    def case(self) -> tuple[str, float, str, int, bool]:
        return self.workload, self.share, self.how, self.seed, self.wrong_profile


class DeadlineOrder(FairAdmission):
    """Calls up the request whose deadline is first. `targets_s`: by request."""

    def __init__(self, cost_model: CostModel, targets_s: Mapping[str, float]) -> None:
        super().__init__(cost_model, QueueSettings(max_waiting=10**6, max_wait_s=inf))
        self._targets_s = targets_s

    def offer(
        self, request_id: RequestId, tenant: str, num_prompt_tokens: int, now: float, **_others: Any
    ) -> list[TurnRefused]:
        rank = round(1000 * (now + self._targets_s[request_id]))
        return super().offer(request_id, tenant, num_prompt_tokens, now, rank=rank)


def is_batch(asked: WorkloadRequest) -> bool:
    return random.Random(asked.request_id).random() < BATCH_SHARE


def run(workload: str, share: float, how: str, seed: int, wrong_profile: bool) -> Run:
    rate = share * CARRIED[workload]
    seconds = max(LEAST_SECONDS, LEAST_REQUESTS / rate)
    made = _arriving(make_workload(workload, ceil(rate * seconds), seed), rate, seed)
    profile = load_profile(PROFILE)
    policy, _, way = how.partition(" ")

    def target_of(asked: WorkloadRequest) -> Target:
        return Target(ttft_s=BATCH_S if is_batch(asked) else PEOPLE_S[workload])

    patient = QueueSettings(max_waiting=10**6, max_wait_s=BATCH_S)
    error = 1 / 1.5 if wrong_profile else 1.0
    config = SimConfig(profile=profile, replicas=4, policy=policy, profile_error=error, seed=seed)
    settings = msgspec.structs.replace(config.scheduler_settings, refit=True)
    admission = None
    if way == "in turns":
        admission = FairAdmission(CostModel(config.told_profile), patient)
    elif how == BY_DEADLINE:
        targets_s = {request.request_id: target_of(request).ttft_s or 0.0 for request in made.requests}
        admission = DeadlineOrder(CostModel(config.told_profile), targets_s)
    simulation = Simulation(
        config,
        made,
        scheduler=make_scheduler(settings, config.told_profile),
        admission=admission,
        tenant_of=lambda asked: "all",
        target_of=target_of if how in WITH_TARGETS else lambda asked: NO_TARGET,
    )
    asked = {request.request_id: request for request in made.requests}
    first = min(request.arrival_s or 0.0 for request in made.openers)
    records = [
        record for record in simulation.run().records if first + seconds / 5 <= record.scheduled_s <= first + seconds
    ]

    def kept(ours: Sequence[RequestRecord]) -> list[RequestRecord]:
        return [r for r in ours if r.ttft_s is not None and r.ttft_s <= (target_of(asked[r.request_id]).ttft_s or 0.0)]

    people = [record for record in records if not is_batch(asked[record.request_id])]
    batch = [record for record in records if is_batch(asked[record.request_id])]
    admitted = [record for record in records if record.ok]
    return Run(
        workload,
        share,
        how,
        seed,
        wrong_profile,
        goodput=round(len(kept(records)) / (0.8 * seconds), 3),
        people=round(len(kept(people)) / len(people), 4),
        batch=round(len(kept(batch)) / max(len(batch), 1), 4),
        admitted=round(len(admitted) / len(records), 4),
        kept=round(len(kept(admitted)) / max(len(admitted), 1), 4),
    )


def _arriving(workload: Workload, rate: float, seed: int) -> Workload:
    rng = random.Random(seed + 1000)
    times, now = [], 0.0
    for _ in workload.openers:
        now += rng.expovariate(rate * len(workload.openers) / len(workload.requests))
        times.append(now)
    return workload.with_arrivals(times)


def table(runs: Sequence[Run]) -> str:
    """Return the goodput of each way for each workload and rate, means over seeds, as a table in Markdown."""
    columns = (
        "workload",
        "asked, requests/s",
        f"best of {len(AS_TODAY)} rules without targets",
        "by deadline alone",
        "`llmd_blend` at once",
        "at once",
        "in turns",
        "gain",
        "people in time",
        "of the admitted in time",
    )
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    right = [one for one in runs if not one.wrong_profile]
    for workload, share in product(CARRIED, SHARES):
        of_case = [one for one in right if (one.workload, one.share) == (workload, share)]
        means = {how: mean(one.goodput for one in ours) for how, ours in _by_way(of_case)}
        best = max(AS_TODAY, key=lambda how: means[how])
        turns = [one for one in of_case if one.how == "preble in turns"]
        in_turns = means["preble in turns"]
        cells = (
            f"{SHOWN[workload]}, {PEOPLE_S[workload]:g} s",
            f"{share * CARRIED[workload]:.3g}",
            f"{means[best]:.3g} (`{best}`)",
            f"{means[BY_DEADLINE]:.3g}",
            f"{means['llmd_blend at once']:.3g}",
            f"{means['preble at once']:.3g}",
            f"{in_turns:.3g}",
            f"{in_turns / means[best]:.2f}",
            f"{mean(one.people for one in turns):.0%}",
            f"{mean(one.kept for one in turns):.1%}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _by_way(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    return [(how, list(ours)) for how, ours in groupby(sorted(runs, key=lambda one: one.how), lambda one: one.how)]


def values(runs: Sequence[Run]) -> dict[str, str]:
    """Return what the page says of the results."""
    wrong = [one for one in runs if one.wrong_profile]
    low = min(mean(one.kept for one in wrong if one.workload == workload) for workload in CARRIED)
    return {"targets": table(runs) + "\n", "value:targets-wrong": f"{low:.1%}"}


def cases() -> list[tuple[str, float, str, int, bool]]:
    right = list(product(CARRIED, SHARES, (*AS_TODAY, BY_DEADLINE, *WITH_TARGETS), SEEDS, (False,)))
    return right + list(product(CARRIED, (1.1,), ("preble in turns",), SEEDS, (True,)))


def kept_runs() -> list[Run]:
    return msgspec.json.decode(RESULT.read_bytes(), type=list[Run])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--more", action="store_true", help="make only the runs that the result has not yet")
    parser.add_argument("--draw", action="store_true", help="fill the page only")
    given = parser.parse_args()
    if not given.draw:
        runs = [one for one in kept_runs() if given.more and one.case in cases()]
        missing = [case for case in cases() if case not in {one.case for one in runs}]
        with ProcessPoolExecutor(given.jobs) as pool:
            for number, one in enumerate(pool.map(run, *zip(*missing, strict=True)), 1):
                runs.append(one)
                print(f"\r{number} of {len(missing)}", end="", file=sys.stderr, flush=True)
        runs.sort(key=lambda one: cases().index(one.case))
        RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(runs), indent=1) + b"\n")
        note("targets")
    fill([PAGE], values(kept_runs()))


if __name__ == "__main__":
    main()
