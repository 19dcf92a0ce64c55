"""Goodput where requests ask for a time to the first token: with targets, and by rules that do not know them.

    python benchmarks/repro/targets.py                    # half an hour on two cores, on the plain core: it has heirs
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
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
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
from preble.core.placing.promises import Outcomes
from preble.core.types import NO_TARGET, RequestId, Target
from preble.decisions.settings import make_scheduler
from preble.lab.metrics import RequestRecord
from preble.lab.sim import SimConfig, Simulation
from preble.lab.sim.agenda import Priority
from preble.lab.sim.calls import REFUSED
from preble.lab.workloads import Workload, WorkloadRequest
from preble.lab.workloads.registry import make_workload
from preble.profiles import load_profile

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "targets.json"
PAGE = ROOT / "docs" / "howto" / "targets.md"
PROFILE = "a6000-mistral-7b"
CARRIED = {"toolbench": 71.1, "programming": 17.5, "video": 7.84, "longdoc": 4.81, "agent": 270.0, "multiturn": 60.7}
"""Requests a second that `preble` carries within the limit of the evaluation; the agent's: about the
highest rate there at which 99 % of its first tokens come within 1 s."""
SHOWN = {
    "toolbench": "tool use",
    "programming": "programming",
    "video": "video",
    "longdoc": "long documents",
    "agent": "embodied agent",
    "multiturn": "conversations",
}
PEOPLE_S = {"toolbench": 0.5, "programming": 0.5, "video": 5.0, "longdoc": 5.0, "agent": 0.5, "multiturn": 0.5}
BATCH_S = 60.0
BATCH_SHARE = 0.3
SHARES = (0.8, 1.1, 1.5)
AGENT = "agent"
"""Measured at 110 % only: its runs take ten times as long as the others'. An episode has 48 turns, more than there is
time for, so fewer requests come than the rate says. A turn that is refused ends its episode."""
CONVERSING = (AGENT, "multiturn")
"""Those in which a request that is refused ends what would have followed."""
LOADS = tuple((workload, share) for workload in CARRIED for share in SHARES if share == 1.1 or workload != AGENT)
OTHERS = tuple(workload for workload in CARRIED if workload != AGENT)
SEEDS = (10, 11)
LEAST_SECONDS, LEAST_REQUESTS = 60.0, 600
AS_TODAY = ("preble", "least_load", "llmd_blend")
"""Rules that know no target; everything is placed as it comes."""
WITH_TARGETS = ("preble in turns", "preble at once", "llmd_blend at once")
"""`in turns`: requests wait in the gateway, the urgent first. `at once`: only refused and placed by their targets, as
llm-d's rule of headroom does it."""
BY_DEADLINE = "preble by deadline"
"""Requests wait in the gateway, whose deadline is first goes first, and none is refused: deadlines alone."""
IN_TURNS = "preble in turns"
ABORTING = ("preble in turns aborting prefills", "preble in turns aborting as llm-d")
"""As in turns; but before a request of people is refused, batch work that no client has seen any of is aborted for it,
and waits again. `prefills`: work without a first token, the newest first, as far as that lets the target be kept; its
prefill is done anew. `as llm-d`: the newest, whatever it has had."""
NARROWING = "preble in turns narrowing"
"""As in turns; but how many of the last outcomes the interval keeps is no constant. It falls a little with each promise
that is kept, and rises with each that breaks, so that about `KEPT_SHARE` are kept (adaptive conformal inference)."""
COMING_AGAIN = "preble in turns coming again"
"""As in turns; but who is refused comes again after `Retry-After`, as clients of OpenAI do by themselves. What it asks
for counts from its first try."""
NARROWED = ("toolbench", "video", "longdoc")
NARROWED_SHARES = (0.8, 1.1)
NARROWED_SEEDS = (*SEEDS, 12, 13, 14, 15)
KEPT_SHARE, STEP, LEAST_SHARE, MOST_SHARE = 0.995, 0.1, 0.25, 0.98
OVERLOADS = (1.1, 1.5, 2.0)
MOST_TRIES = 3
MOST_ABORTS = 2
"""Of one batch request. After so many it runs to its end, so batch work ends whatever people ask for."""


class Run(msgspec.Struct, frozen=True):
    """One run. `came`: requests a second that came while it was measured. `people`, `batch`: shares of them that got
    their first token in time; `admitted`: share of all that was not refused; `kept`: of those with a target that were
    admitted. In turns also `promised`, the share of the admitted whose target could be kept if nothing else were to do,
    and `promises_kept`, the share of those that were in time; `aborts`: batch work that was aborted, for each request.
    """

    workload: str
    share: float
    how: str
    seed: int
    wrong_profile: bool
    came: float
    goodput: float
    people: float
    batch: float
    admitted: float
    kept: float
    promised: float | None = None
    promises_kept: float | None = None
    aborts: float = 0.0

    @property
    def case(self) -> tuple[str, float, str, int, bool]:
        return self.workload, self.share, self.how, self.seed, self.wrong_profile


class Turns:
    """The admission of a gateway, which notes to which requests something was promised. No heir: the core may be
    compiled."""

    def __init__(self, cost_model: CostModel, settings: QueueSettings) -> None:
        self._admission = FairAdmission(cost_model, settings)
        self.promised: set[RequestId] = set()

    def offer(
        self, request_id: RequestId, tenant: str, num_prompt_tokens: int, now: float, **others: Any
    ) -> list[TurnRefused]:
        if others.get("start_by") is not None:
            self.promised.add(request_id)
        return self._admission.offer(request_id, tenant, num_prompt_tokens, now, **others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._admission, name)


class Aborting(Simulation):
    """Aborts batch work for people whose target could not be kept otherwise. `only_prefills`: see `ABORTING`."""

    only_prefills = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.aborts: Counter[str] = Counter()
        self._tried: set[str] = set()

    def _end(self, call: Any, now: float, **how: Any) -> None:
        asked = call.asked
        is_new = how.get("error") == REFUSED and not is_batch(asked) and asked.request_id not in self._tried
        if not is_new or not self._make_room(call, now):
            super()._end(call, now, **how)
            return
        self._tried.add(asked.request_id)
        self._offer(call, now)

    def _make_room(self, call: Any, now: float) -> bool:
        """Abort the newest batch work on one replica. Return False where that would not do, and nothing is aborted."""
        running = [other for other in self._calls.values() if self._may_be_aborted(other)]
        running.sort(key=lambda other: other.scheduled_s, reverse=True)
        if not self.only_prefills:
            running = running[:1]
        late_s = self._scheduler.forecast(call.request, now).late_s(call.request, now)
        for replica in dict.fromkeys(other.replica for other in running):
            here, freed_s = [], 0.0
            for other in running:
                if other.replica is replica:
                    here.append(other)
                    freed_s += self._prefill_s(other)
                if here and (freed_s > late_s or not self.only_prefills):
                    for victim in here:
                        self._abort(victim, now)
                    return True
        return False

    def _prefill_s(self, call: Any) -> float:
        placed = call.placement
        return self._cost_model.prefill_s(placed.num_prompt_tokens - placed.matched_tokens, placed.matched_tokens)

    def _may_be_aborted(self, call: Any) -> bool:
        if not is_batch(call.asked) or not call.delivered or self.aborts[call.asked.request_id] >= MOST_ABORTS:
            return False
        return call.first_token_s is None or not self.only_prefills

    def _abort(self, call: Any, now: float) -> None:
        """Take it from its replica, and let it wait again; what was taken is not refused for its target."""
        request, admission = call.request, self.admission
        assert admission is not None
        self.aborts[call.asked.request_id] += 1
        call.replica.local.abort(request.request_id)
        self._timers.scheduler.on_finish(request.request_id, 0, now)
        admission.ended(request.request_id, 0)
        call.replica = call.placement = call.first_token_s = None
        call.delivered = False
        self._refuse(admission.offer(request.request_id, "all", request.num_prompt_tokens, now), now)


class ComingAgain(Simulation):
    """Lets a refused request come again, `MOST_TRIES` times in all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tries: Counter[str] = Counter()

    def _end(self, call: Any, now: float, **how: Any) -> None:
        self._tries[call.asked.request_id] += 1
        if how.get("error") != REFUSED or self._tries[call.asked.request_id] >= MOST_TRIES:
            super()._end(call, now, **how)
            return
        refused_for_s = self._scheduler.forecast(call.request, now).refused_for_s(call.request, now)
        again_s = now + max(ceil(refused_for_s), 1)  # the header has whole seconds
        self._agenda.at(again_s, Priority.ARRIVAL, partial(self._come_again, call))

    def _come_again(self, call: Any, now: float) -> None:
        call.request.promise(self.target_of(call.asked), now)
        self._offer(call, now)


class MovingInterval(Outcomes):
    """An interval whose share of the last outcomes moves with what becomes of promises."""

    __slots__ = ("_share",)

    def __init__(self) -> None:
        super().__init__()
        self._share = MOST_SHARE

    def note(self, predicted_s: float, actual_s: float) -> None:
        super().note(predicted_s, actual_s)
        self._move(0.0)

    def promised(self, *, is_kept: bool) -> None:
        self._move(STEP * (KEPT_SHARE - 1.0 if is_kept else KEPT_SHARE))

    def _move(self, by: float) -> None:
        self._share = min(max(self._share + by, LEAST_SHARE), MOST_SHARE)
        if self.are_enough:
            self.excess_s = self._by_size[min(int(self._share * len(self._by_size)), len(self._by_size) - 1)]


class Narrowing(Simulation):
    """Predicts first tokens with a `MovingInterval`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._interval = self._scheduler._promises.ttft = MovingInterval()

    def _tell_prefilled(self, request_id: RequestId, now: float) -> None:
        super()._tell_prefilled(request_id, now)
        assert isinstance(self.admission, Turns)
        if request_id in self.admission.promised:
            self._interval.promised(is_kept=now <= self._calls[request_id].request.first_token_by)


KINDS: Mapping[str, type[Simulation]] = {
    **dict.fromkeys(ABORTING, Aborting),
    NARROWING: Narrowing,
    COMING_AGAIN: ComingAgain,
}


class DeadlineOrder(Turns):
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
    admission: Any = None
    if way.startswith("in turns"):
        admission = Turns(CostModel(config.told_profile), patient)
    elif how == BY_DEADLINE:
        targets_s = {request.request_id: target_of(request).ttft_s or 0.0 for request in made.requests}
        admission = DeadlineOrder(CostModel(config.told_profile), targets_s)
    kind = KINDS.get(how, Simulation)
    simulation = kind(
        config,
        made,
        scheduler=make_scheduler(settings, config.told_profile),
        admission=admission,
        tenant_of=lambda asked: "all",
        target_of=target_of if how in (*WITH_TARGETS, *ABORTING, NARROWING, COMING_AGAIN) else lambda asked: NO_TARGET,
    )
    if isinstance(simulation, Aborting):
        simulation.only_prefills = how == ABORTING[0]
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
    promised = [r for r in admitted if r.request_id in admission.promised] if way.startswith("in turns") else None
    return Run(
        workload,
        share,
        how,
        seed,
        wrong_profile,
        came=round(len(records) / (0.8 * seconds), 3),
        goodput=round(len(kept(records)) / (0.8 * seconds), 3),
        people=round(len(kept(people)) / len(people), 4),
        batch=round(len(kept(batch)) / max(len(batch), 1), 4),
        admitted=round(len(admitted) / len(records), 4),
        kept=round(len(kept(admitted)) / max(len(admitted), 1), 4),
        promised=None if promised is None else round(len(promised) / max(len(admitted), 1), 4),
        promises_kept=None if promised is None else round(len(kept(promised)) / max(len(promised), 1), 4),
        aborts=round(simulation.aborts.total() / len(asked), 4) if isinstance(simulation, Aborting) else 0.0,
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
        "at most",
        "people in time",
        "of the admitted in time",
        "of the promised in time",
    )
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    right = [one for one in runs if not one.wrong_profile and one.seed in SEEDS]
    for workload, share in LOADS:
        of_case = [one for one in right if (one.workload, one.share) == (workload, share)]
        means = {how: mean(one.goodput for one in ours) for how, ours in _by_way(of_case)}
        best = max(AS_TODAY, key=lambda how: means[how])
        turns = [one for one in of_case if one.how == IN_TURNS]
        in_turns = means[IN_TURNS]
        cells = (
            f"{SHOWN[workload]}, {PEOPLE_S[workload]:g} s",
            f"{share * CARRIED[workload]:.3g}",
            f"{means[best]:.3g} (`{best}`)",
            f"{means[BY_DEADLINE]:.3g}",
            f"{means['llmd_blend at once']:.3g}",
            f"{means['preble at once']:.3g}",
            f"{in_turns:.3g}",
            f"{in_turns / means[best]:.2f}",
            "" if workload in CONVERSING else f"{mean(one.came for one in turns) / means[best]:.2f}",
            f"{mean(one.people for one in turns):.0%}",
            f"{mean(one.kept for one in turns):.1%}",
            f"{mean(one.promises_kept or 0.0 for one in turns):.1%}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _by_way(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    return [(how, list(ours)) for how, ours in groupby(sorted(runs, key=lambda one: one.how), lambda one: one.how)]


def values(runs: Sequence[Run]) -> dict[str, str]:
    """Return what the page says of the results."""
    wrong = [one for one in runs if one.wrong_profile]
    low = min(mean(one.promises_kept or 0.0 for one in wrong if one.workload == workload) for workload in OTHERS)
    all_low = min(mean(one.kept for one in wrong if one.workload == workload) for workload in OTHERS)
    return {
        "targets": table(runs) + "\n",
        "targets-aborting": aborting_table(runs) + "\n",
        "targets-narrowing": narrowing_table(runs) + "\n",
        **{f"value:targets-again-{workload}": f"{again(runs, workload):.2f}" for workload in CONVERSING},
        "value:targets-wrong": f"{low:.1%}",
        "value:targets-wrong-admitted": f"{all_low:.1%}",
    }


def again(runs: Sequence[Run], workload: str) -> float:
    """Return the goodput of clients that come again, over that of the best rule without targets; means over seeds."""
    of_case = [one for one in runs if (one.workload, one.share, one.wrong_profile) == (workload, 1.1, False)]
    means = {how: mean(one.goodput for one in ours if one.seed in SEEDS) for how, ours in _by_way(of_case)}
    return means[COMING_AGAIN] / max(means[how] for how in AS_TODAY)


def aborting_table(runs: Sequence[Run]) -> str:
    """Return the goodput in turns, and with batch work aborted besides, means over seeds, as a table in Markdown."""
    right = [one for one in runs if not one.wrong_profile and one.seed in SEEDS]
    lines = [
        "| workload | load | in turns | aborting prefills | aborts a request | as llm-d | aborts a request |",
        "|" + "---|" * 7,
    ]
    for workload, share in product(OTHERS, OVERLOADS):
        ways = {
            how: [one for one in right if (one.workload, one.share, one.how) == (workload, share, how)]
            for how in (IN_TURNS, *ABORTING)
        }
        goodputs = [mean(one.goodput for one in ways[how]) for how in ways]
        cells = [SHOWN[workload], f"{share:.0%}", f"{goodputs[0]:.3g}"]
        for how, found in zip(ABORTING, goodputs[1:], strict=True):
            cells += [f"{found:.3g} ({found / goodputs[0] - 1:+.1%})", f"{mean(one.aborts for one in ways[how]):.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def narrowing_table(runs: Sequence[Run]) -> str:
    """Return goodput and kept promises with and without a moving interval, means over seeds, as a table in Markdown."""
    lines = [
        "| workload | load | in turns | promises kept | narrowing | promises kept | better in |",
        "|" + "---|" * 7,
    ]
    for workload, share in product(NARROWED, NARROWED_SHARES):
        of_case = [one for one in runs if (one.workload, one.share, one.wrong_profile) == (workload, share, False)]
        fixed, moving = (
            sorted((one for one in of_case if one.how == how), key=lambda one: one.seed)
            for how in (IN_TURNS, NARROWING)
        )
        goodputs = [mean(one.goodput for one in ours) for ours in (fixed, moving)]
        kept = [f"{mean(one.promises_kept or 0.0 for one in ours):.2%}" for ours in (fixed, moving)]
        gains = sum(new.goodput > old.goodput for old, new in zip(fixed, moving, strict=True))
        change = f"{goodputs[1]:.3g} ({goodputs[1] / goodputs[0] - 1:+.1%})"
        cells = (SHOWN[workload], f"{share:.0%}", f"{goodputs[0]:.3g}", kept[0], change, kept[1])
        lines.append("| " + " | ".join((*cells, f"{gains} of {len(fixed)} seeds")) + " |")
    return "\n".join(lines)


def cases() -> list[tuple[str, float, str, int, bool]]:
    ways = (*AS_TODAY, BY_DEADLINE, *WITH_TARGETS)
    right = [(*load, how, seed, False) for load, how, seed in product(LOADS, ways, SEEDS)]
    wrong = list(product(OTHERS, (1.1,), (IN_TURNS,), SEEDS, (True,)))
    aborting = list(product(OTHERS, OVERLOADS, ABORTING, SEEDS, (False,)))
    narrowing = list(product(NARROWED, NARROWED_SHARES, (IN_TURNS, NARROWING), NARROWED_SEEDS, (False,)))
    narrowing = [case for case in narrowing if case not in right]
    coming_again = list(product(CONVERSING, (1.1,), (COMING_AGAIN,), SEEDS, (False,)))
    most = list(product(OTHERS, (OVERLOADS[-1],), (IN_TURNS,), SEEDS, (False,)))
    return right + wrong + aborting + narrowing + coming_again + most


def kept_runs() -> list[Run]:
    return msgspec.json.decode(RESULT.read_bytes(), type=list[Run])


def keep(runs: list[Run]) -> None:
    order = {case: place for place, case in enumerate(cases())}
    runs.sort(key=lambda one: order[one.case])
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(runs), indent=1) + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--more", action="store_true", help="make only the runs that the result has not yet")
    parser.add_argument("--draw", action="store_true", help="fill the page only")
    given = parser.parse_args()
    if not given.draw:
        runs = [one for one in kept_runs() if given.more and one.case in cases()] if RESULT.exists() else []
        missing = [case for case in cases() if case not in {one.case for one in runs}]
        note("targets")
        with ProcessPoolExecutor(given.jobs) as pool:
            for number, done in enumerate(as_completed([pool.submit(run, *case) for case in missing]), 1):
                runs.append(done.result())
                keep(runs)
                print(f"\r{number} of {len(missing)}", end="", file=sys.stderr, flush=True)
    if {one.case for one in kept_runs()} == {*cases()}:
        fill([PAGE], values(kept_runs()))


if __name__ == "__main__":
    main()
