"""Two real vLLM replicas near saturation, their caches half as large as the tools: policies in turns.

    python benchmarks/repro/real_check.py                          # half an hour; nothing else may run meanwhile
    taskset -c 1 nice -n -10 python benchmarks/repro/real_check.py # on one core, before all others on it
    python benchmarks/repro/real_check.py --minutes 4 --rounds 1 --try     # to try it out; keeps nothing
    python benchmarks/repro/real_check.py --draw                   # fill in the pages from the results

A short search finds what least load and `preble` complete a second with `USERS` requests always in flight; the rate
follows from that. Then the policies take turns, in another order each round, on the same engines, the same tools and,
within a round, the same requests at the same times. Caches stay as the turn before left them; the gateway is new, and
the first part of a turn is not measured. `make engines` sets the engines up. Each turn is kept as it ends in
benchmarks/results/real_check.json.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from statistics import mean
from unittest.mock import patch

import cpu_engines
import msgspec
from cpu_engines import CORES, DISTURBED, KV_TOKENS, NUMBERS, REPLICAS, TOOLS, Measured, latency_s
from made_by import note
from page import EVALUATION, NOT_RUN, fill, markdown

from preble.core.costs.model import CostProfile
from preble.engines.starting.launch import ReplicaProcess
from preble.lab.metrics.estimates import estimate
from preble.lab.profiling import fit_profile
from preble.lab.report import Table
from preble.lab.report.formats import significant
from preble.lab.workloads import Workload, WorkloadRequest
from preble.lab.workloads.arrivals import make_arrivals
from preble.lab.workloads.generators.pieces import Asked

PATH = cpu_engines.RESULTS / "real_check.json"
POLICIES = ("preble", "sticky_until_saturated", "e2", "least_load")
BASIS, OURS = "least_load", "preble"

CACHED_SHARE = 0.5
NUM_TOOLS = round(REPLICAS * KV_TOKENS / CACHED_SHARE / (TOOLS.system_tokens + TOOLS.shared_tokens.mean))
SEED = 57

MOST_REQUESTS = 20_000

USERS = 8 * REPLICAS
SEARCHED, SEARCH_REQUESTS = ("least_load", "preble"), 320
NEAR = 0.9
"""The rate as a part of what a policy completes at most: above it, queues of random arrivals grow for minutes."""

TELLS_NOTHING = 1.5
"""If `preble` completes this many times what least load does, it is idle at least load's rate: use its own rate."""

WARM_SHARE = 1 / 3
"""Of a turn's requests: what they compute is more than the caches hold."""


class Turn(msgspec.Struct, frozen=True):
    """One policy in one round; `place`: of its turn in the round, from 0."""

    round: int
    place: int
    policy: str
    measured: Measured


class Results(msgspec.Struct, frozen=True):
    """Every turn. `completed_rps`: what the searched policies complete at most; `rate_of`: whose rate was taken."""

    date: str
    engine_version: str
    cores: int
    completed_rps: dict[str, float]
    rate_of: str
    rps: float
    turn_s: float
    turns: list[Turn] = []

    @property
    def rounds(self) -> int:
        """Those in which every policy had its turn."""
        return min(sum(turn.policy == policy for turn in self.turns) for policy in POLICIES)

    def of(self, policy: str) -> list[Measured]:
        """Its turns in the complete rounds, in order."""
        return [turn.measured for turn in self.turns if turn.policy == policy][: self.rounds]


# ---- measured ------------------------------------------------------------------------------------------------------


async def measure_all(minutes: float, rounds: int, *, keep: bool) -> Results:
    async with cpu_engines.replicas("vllm", cpu_engines.LOGS / "real_check") as started:
        say("engines are up; measuring their profile")
        measured = await cpu_engines.measurements(started[0].url, SEED, quick=True)
        profile = fit_profile(measured, name="vllm-tiny", source="a quick measurement").profile
        began_s = asyncio.get_running_loop().time()
        completed = {policy: await completed_rps(started, policy, profile) for policy in SEARCHED}
        left_s = 60 * minutes - (asyncio.get_running_loop().time() - began_s)
        turn_s = max(left_s / (rounds * len(POLICIES)), 20.0)
        rate_of, rps = chosen_rate(completed)
        say(f"{rps:.2f} requests/s, near what {rate_of} completes; turns of {turn_s:.0f} s")
        date = datetime.now(UTC).date().isoformat()
        results = Results(date, measured.engine, len(CORES), completed, rate_of, rps, turn_s)
        loads = workloads(rounds, rps, turn_s)
        for number, load in enumerate(loads):
            for place, policy in enumerate(order(number)):
                one = await turn(started, policy, profile, load)
                results.turns.append(Turn(number, place, policy, one))
                tell(results, rounds)
                if keep:
                    PATH.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
                    note("real_check")
    return results


async def completed_rps(started: Sequence[ReplicaProcess], policy: str, profile: CostProfile) -> float:
    """Requests that it completes a second where a fixed number is always in flight."""
    found = (await turn(started, policy, profile, closed_loop(requests()[:SEARCH_REQUESTS]))).summary
    say(f"search: {policy} completes {found.requests_per_s:.2f}/s with {USERS} in flight, {found.hit_rate:.0%} hits")
    return found.requests_per_s


@cache
def requests() -> tuple[WorkloadRequest, ...]:
    """All that may be sent, first the search's. One call: how long a tool is depends on the number of requests."""
    return TOOLS(Asked(MOST_REQUESTS, SEED, num_prefixes=NUM_TOOLS)).requests


def closed_loop(made: Sequence[WorkloadRequest]) -> Workload:
    """Each request follows the one `USERS` before it, as soon as that is answered."""
    chained = (
        replace(request, session=f"user-{i % USERS}", parent=made[i - USERS].request_id)
        if i >= USERS
        else replace(request, session=f"user-{i}", arrival_s=0.0)
        for i, request in enumerate(made)
    )
    return Workload("search", tuple(chained))


def chosen_rate(completed: dict[str, float]) -> tuple[str, float]:
    """Whose rate is taken, and the rate.

    >>> chosen_rate({"least_load": 5.0, "preble": 6.0}), chosen_rate({"least_load": 5.0, "preble": 10.0})
    (('least_load', 4.5), ('preble', 9.0))
    """
    rate_of = OURS if completed[OURS] > TELLS_NOTHING * completed[BASIS] else BASIS
    return rate_of, NEAR * completed[rate_of]


def workloads(rounds: int, rps: float, turn_s: float) -> list[Workload]:
    """A workload for each round: other requests for the same tools."""
    size = math.ceil(rps * turn_s)
    made = requests()[SEARCH_REQUESTS:]
    if rounds * size > len(made):
        raise SystemExit(f"{rounds * size} requests are more than {len(made)}; give fewer --rounds or --minutes")
    return [
        Workload(f"round {number}", made[number * size :][:size]).with_arrivals(
            make_arrivals("poisson", size, rps, random.Random(f"real check/{SEED}/{number}"))
        )
        for number in range(rounds)
    ]


def order(number: int) -> list[str]:
    """The policies in the order of their turns in this round."""
    return random.Random(f"real check/order/{SEED}/{number}").sample(POLICIES, len(POLICIES))


async def turn(started: Sequence[ReplicaProcess], policy: str, profile: CostProfile, load: Workload) -> Measured:
    """A new gateway; caches as they are. The first part warms them and does not count.

    The gateway only reports what its check of events finds: policies ignore the cache of a replica that it distrusts.
    """
    with patch.dict(os.environ, {"PREBLE_PARITY__DISTRUST": "false"}):
        return await _turn(started, policy, profile, load)


async def _turn(started: Sequence[ReplicaProcess], policy: str, profile: CostProfile, load: Workload) -> Measured:
    async with cpu_engines.gateway(started, policy, profile, refit=True) as front:
        return await cpu_engines.send(started, front, load, skip=round(WARM_SHARE * len(load.requests)))


def tell(results: Results, rounds: int) -> None:
    """Say what the last turn was, and whether something disturbed it."""
    last = results.turns[-1]
    one = last.measured
    times = " ".join(f"{what} {number} {latency_s(one.summary, what, number):.3f} s" for what, number in NUMBERS)
    done = f"turn {len(results.turns)} of {rounds * len(POLICIES)}"
    say(f"{done}: {last.policy}: {times}; hits {one.summary.hit_rate or 0:.1%}, {one.summary.errors} failed")
    if one.busy["others"] > DISTURBED:
        say(f"warning: the machine was busy: others used {one.busy['others']:.0%} of a core of ours")


# ---- what is shown -------------------------------------------------------------------------------------------------


def computed_tokens(one: Measured) -> float:
    """Prompt tokens that the engines computed for a request."""
    return (one.summary.recomputed_tokens or 0) / one.summary.requests


def seconds(what: str, number: str) -> Callable[[Measured], float]:
    return lambda one: latency_s(one.summary, what, number)


COLUMNS: dict[str, tuple[Callable[[Measured], float], float]] = {
    "hit rate, %": (lambda one: one.summary.hit_rate or 0.0, 100),
    "computed tokens a request": (computed_tokens, 1),
    **{f"{what} {number}, ms": (seconds(what, number), 1000) for what, number in NUMBERS},
}
"""Each number of a turn, and the factor with which it is shown."""


def shown(values: Sequence[float], digits: int = 3) -> str:
    """
    >>> shown([100.0, 110.0, 120.0])
    '110 ± 25'
    """
    found = estimate(values)
    interval = "" if found.half_width is None else f" ± {significant(found.half_width, 2)}"
    return f"{significant(found.mean, digits)}{interval}"


def ratios(results: Results, policy: str) -> list[float]:
    """Its mean E2E over that of `preble`, round by round."""
    of, pairs = seconds("E2E", "mean"), zip(results.of(policy), results.of(OURS), strict=True)
    return [of(mine) / of(ours) for mine, ours in pairs]


def turns_table(results: Results) -> Table:
    rows = []
    for policy in POLICIES:
        mine = results.of(policy)
        cells = (shown([factor * of(one) for one in mine]) for of, factor in COLUMNS.values())
        rows.append((policy, *cells, "" if policy == OURS else shown(ratios(results, policy))))
    return Table(("policy", *COLUMNS, f"E2E mean over {OURS}'s"), rows, caption=conditions(results))


def conditions(results: Results) -> str:
    """What was asked, of what, and how undisturbed."""
    turns = [one for policy in POLICIES for one in results.of(policy)]
    return f"{_asked(results)} {_disturbed(results, turns)}"


def _asked(results: Results) -> str:
    searched = ", ".join(f"{policy} {rps:.2f}/s" for policy, rps in results.completed_rps.items())
    return (
        f"Means over {results.rounds} turns with 95 % intervals; the last column compares turns of the same round. "
        f"{results.rps:.2f} requests/s, {NEAR:.0%} of what {results.rate_of} completes with {USERS} requests always in "
        f"flight ({searched}); {NUM_TOOLS} tools; turns of {results.turn_s:.0f} s, of which the first third does not "
        "count."
    )


def _disturbed(results: Results, turns: Sequence[Measured]) -> str:
    cores = "one core" if results.cores == 1 else f"{results.cores} cores"
    busy = {name: f"{mean(one.busy[name] for one in turns):.0%}" for name in ("replica", "gateway", "client")}
    return (
        f"{sum(one.summary.errors for one in turns)} requests failed. {results.engine_version} on {cores} in all: "
        f"{busy['replica']} of a core for each replica, {busy['gateway']} for the gateway, {busy['client']} for the "
        f"load generator; others took at most {max(one.busy['others'] for one in turns):.0%} in a turn. {results.date}."
    )


def tables(results: Results | None) -> dict[str, str]:
    """What stands between the markers of the page, by name."""
    return {"real-check": markdown(turns_table(results)) if results and results.rounds else NOT_RUN}


def values(results: Results | None) -> dict[str, str]:
    """What the sentences of the page say, by marker."""
    if not results or not results.rounds:
        return {}
    return {f"value:real-{policy}": shown(ratios(results, policy)) for policy in POLICIES if policy != OURS}


def known_results() -> Results | None:
    """Return the kept results, None if there are none."""
    return msgspec.json.decode(PATH.read_bytes(), type=Results) if PATH.exists() else None


def say(text: str) -> None:
    print(f"real_check: {datetime.now(UTC):%H:%M:%S}: {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes of search and turns together")
    parser.add_argument("--rounds", type=int, default=3, help="rounds: one turn of each policy in each")
    parser.add_argument("--try", dest="tried", action="store_true", help="only print the results")
    parser.add_argument("--draw", action="store_true", help="fill in the page from the results that are there")
    options = parser.parse_args()
    if options.draw:
        results = known_results()
    else:
        results = asyncio.run(measure_all(options.minutes, options.rounds, keep=not options.tried))
    made = tables(results)
    if not options.tried:
        fill(EVALUATION, made | values(results))
    print(*made.values(), sep="\n")


if __name__ == "__main__":
    main()
