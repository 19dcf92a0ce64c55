"""The case of fairness.py: what is asked of one replica, and what one run of it shows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Literal

import msgspec

from preble.lab.metrics import RequestRecord
from preble.lab.metrics.summary import TimeSummary, distribution, hit_rate, percentile
from preble.lab.workloads import Segment, Workload, WorkloadRequest
from preble.lab.workloads.arrivals import make_arrivals
from preble.lab.workloads.trace import made_up_tokens

WARM_UP = "warm-up"
Kind = Literal["hit", "miss"]


class Case(msgspec.Struct, frozen=True):
    """What is asked. `places`: requests that the replica runs at once. `burst`: requests that measure its capacity.

    A hit has one of the `prefixes` and a tail of its own; a miss is as long and has nothing that was seen before.
    """

    requests: int
    burst: int
    places: int
    output_tokens: tuple[int, int]
    prefix_tokens: int
    tail_tokens: int
    prefixes: int = 4


class Point(msgspec.Struct, frozen=True):
    """How much is asked. `utilisation`: arrivals / what the replica can bear. `misses`: their share of the requests."""

    utilisation: float
    misses: float = 0.05


FULL, RUSH = Point(1.0), Point(1.1)
"""At capacity; and above it for as long as a run lasts, so that a short one has a queue, too."""


class Side(msgspec.Struct, frozen=True):
    """The hits or the misses. `cached`: the share of their prompt tokens that the replica had."""

    requests: int
    ttft: TimeSummary
    cached: float


class Run(msgspec.Struct, frozen=True):
    """One order under one seed.

    `capacity_rps`: requests/s of a burst, first come first served. `errors`: by kind. `ttft`: of all requests.
    `share_of_misses`: of the time to first token of all requests together. `waiting_mean`, `waiting_max`: requests
    without their first token that an arriving one found. `lag_p99_s`: how late the load generator was.
    """

    order: str
    point: Point
    seed: int
    capacity_rps: float
    errors: dict[str, int]
    hits: Side
    misses: Side
    ttft: TimeSummary
    share_of_misses: float
    waiting_mean: float
    waiting_max: int
    lag_p99_s: float


class Results(msgspec.Struct, frozen=True):
    """Every run on one engine."""

    engine: str
    case: Case
    runs: list[Run]


def workload(case: Case, point: Point, capacity_rps: float, seed: int) -> Workload:
    """The requests of one seed: the same ones for every order."""
    rng = random.Random(f"fairness/{point.misses}/{seed}")
    times = make_arrivals("poisson", case.requests, point.utilisation * capacity_rps, rng)
    kinds: list[Kind] = ["miss" if rng.random() < point.misses else "hit" for _ in times]
    requests = (asked(case, seed, i, kind, rng) for i, kind in enumerate(kinds))
    return Workload("fairness", tuple(requests)).with_arrivals(times)


def burst(case: Case, misses: float, seed: int) -> Workload:
    """As many as measure the capacity, all in one instant."""
    fewer = msgspec.structs.replace(case, requests=case.burst)
    return workload(fewer, Point(1.0, misses), 1.0, seed).with_arrivals([0.0] * case.burst)


def warm_up(case: Case, seed: int) -> Workload:
    """Each prefix of a seed once."""
    requests = (
        WorkloadRequest(f"{WARM_UP}-{i}", (prefix(case, seed, i),), 1, arrival_s=0.0) for i in range(case.prefixes)
    )
    return Workload(WARM_UP, tuple(requests))


def asked(case: Case, seed: int, number: int, kind: Kind, rng: random.Random) -> WorkloadRequest:
    chosen = prefix(case, seed, rng.randrange(case.prefixes))
    head = chosen if kind == "hit" else own(f"head {seed} {number}", case.prefix_tokens)
    tail = own(f"tail {seed} {number}", case.tail_tokens)
    return WorkloadRequest(f"{kind}-{number}", (head, tail), rng.randint(*case.output_tokens))


def prefix(case: Case, seed: int, number: int) -> Segment:
    name = f"prefix {seed} {number}"
    return Segment(name, tokens=made_up_tokens(name, case.prefix_tokens))


def own(name: str, num_tokens: int) -> Segment:
    return Segment(tokens=made_up_tokens(name, num_tokens))


def condense(order: str, point: Point, seed: int, capacity_rps: float, records: Sequence[RequestRecord]) -> Run:
    """What one run shows; the warm-up is left out."""
    counted = [r for r in records if not r.request_id.startswith(WARM_UP)]
    good = [r for r in counted if r.ok and r.ttft_s is not None]
    hits, misses = (side([r for r in good if r.request_id.startswith(kind)]) for kind in ("hit", "miss"))
    everybody = side(good)
    found = waiting_found(good)
    return Run(
        order=order,
        point=point,
        seed=seed,
        capacity_rps=capacity_rps,
        errors=dict(Counter(r.error or "no token" for r in counted if not r.ok or r.ttft_s is None)),
        hits=hits,
        misses=misses,
        ttft=everybody.ttft,
        share_of_misses=misses.ttft.mean_s * misses.requests / (everybody.ttft.mean_s * everybody.requests),
        waiting_mean=sum(found) / len(found),
        waiting_max=max(found),
        lag_p99_s=percentile([r.lag_s for r in good], 99),
    )


def side(records: Sequence[RequestRecord]) -> Side:
    ttft = distribution([r.ttft_s for r in records if r.ttft_s is not None])
    if ttft is None:
        raise SystemExit("fairness: requests of one kind got no answer at all; look into the engine's log")
    return Side(len(records), ttft, hit_rate(records) or 0.0)


def waiting_found(records: Sequence[RequestRecord]) -> list[int]:
    """How many waited for their first token when each request came."""
    changes = [(r.scheduled_s, 1) for r in records] + [(r.first_token_s or 0.0, -1) for r in records]
    waiting, found = 0, []
    for _, change in sorted(changes):
        if change == 1:
            found.append(waiting)
        waiting += change
    return found


def requests_per_s(records: Sequence[RequestRecord]) -> float:
    """Of a burst, until nine tenths are answered: after that places stay empty."""
    answered = [r for r in records if r.ok and not r.request_id.startswith(WARM_UP)]
    return 0.9 * len(answered) / percentile([r.e2e_s for r in answered], 90)


def select(results: Results, order: str, point: Point) -> list[Run]:
    return [run for run in results.runs if (run.order, run.point) == (order, point)]


def mid(runs: Iterable[Run], value: Callable[[Run], float]) -> float:
    """The median over the seeds."""
    return median(value(run) for run in runs)
