"""The best placement that is known of a small workload: found by trying, to be held against the bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import msgspec

from preble.core.types import ReplicaId
from preble.errors import ConfigError
from preble.sim.config import PREFIX_ORACLE, SimConfig
from preble.sim.oracle.bound import OracleBound, lower_bound
from preble.sim.oracle.prefix_oracle import Assigned
from preble.sim.result import SimResult
from preble.sim.simulation import simulate
from preble.workloads import Workload

MOVED = (1, 1, 2, 4)
"""Requests that are placed anew at once, by chance: sometimes several have to move for anything to become better."""


def best_known(
    workload: Workload,
    config: SimConfig,
    *,
    policies: Sequence[str] = ("preble", "e2", PREFIX_ORACLE),
    tries: int = 500,
    rng: Random,
    on_try: Callable[[SimResult], None] = lambda best: None,
) -> SimResult:
    """The run with the lowest mean E2E that was found. Each try simulates the whole workload once.

    Begins with the best of `policies`. Each try then sends some requests elsewhere, those rather that take much longer
    than they would alone, and is gone on from if it is better. `on_try` is given the best run after each one. A run in
    which fewer requests fail is better than any in which more do.

    Raises: ConfigError: there is no policy, or the workload has no bound.
    """
    if not policies:
        raise ConfigError("best_known: name a policy to begin with")
    bound = lower_bound(workload, config)
    runs = [simulate(msgspec.structs.replace(config, policy=policy), workload) for policy in policies]
    best = min(runs, key=_badness)
    for _ in range(tries):
        moved = _moved(best, bound, config.initial_replicas, rng)
        run = simulate(config, workload, policy=Assigned("best_known", moved))
        best = min(best, run, key=_badness)
        on_try(best)
    return best


def _badness(run: SimResult) -> tuple[int, float]:
    return run.summary.errors, run.summary.e2e.mean_s if run.summary.e2e else 0.0


def _moved(run: SimResult, bound: OracleBound, replicas: Sequence[ReplicaId], rng: Random) -> dict[str, ReplicaId]:
    """The placements of a run, some of them changed."""
    placed = {record.request_id: ReplicaId(record.replica) for record in run.records if record.replica is not None}
    excess_s = {
        record.request_id: max((record.e2e_s or 0.0) - bound.requests[record.request_id].e2e_s, 0.0) + 1e-9
        for record in run.records
        if record.request_id in bound.requests
    }
    chosen = rng.choices(list(excess_s), list(excess_s.values()), k=rng.choice(MOVED))
    return placed | {request_id: rng.choice(replicas) for request_id in chosen}
