"""Replicas of different speed: what is learned of them from live requests, and what becomes of it."""

from __future__ import annotations

import pytest

from preble.core.cluster.speeds import MEMORY_S, MIN_TIMES, ReplicaSpeeds
from preble.profiles import load_profile
from preble.sim.config import SimConfig
from preble.sim.result import SimResult
from preble.sim.simulation import Simulation
from preble.workloads.plan import WorkloadPlan

IDLE = [0.0, 0.0, 0.0]


def noted(*seconds: float, now: float = 0.0) -> ReplicaSpeeds:
    """Replica i takes `seconds[i]` for what should take a second."""
    speeds = ReplicaSpeeds()
    for replica, measured_s in enumerate(seconds):
        for _ in range(MIN_TIMES):
            speeds.note(replica, measured_s, 1.0, now)
    return speeds


def slowness(speeds: ReplicaSpeeds, now: float = 10.0) -> list[float] | None:
    speeds.update(now, IDLE)
    return speeds.slowness


def test_a_slow_replica_is_found_by_its_times_relative_to_the_others() -> None:
    assert slowness(noted(2.0, 20.0, 2.1)) == [1.0, pytest.approx(20 / 2.1), 1.0]


def test_a_profile_that_is_wrong_for_all_alike_makes_none_slow() -> None:
    assert slowness(noted(5.0, 5.5, 6.0)) is None


def test_one_bad_time_makes_no_replica_slow() -> None:
    speeds = noted(1.0, 1.0, 1.0)
    speeds.note(1, 100.0, 1.0, 1.0)
    assert slowness(speeds) is None


def test_too_few_times_say_nothing() -> None:
    speeds = noted(1.0, 1.0)
    for _ in range(MIN_TIMES - 1):
        speeds.note(2, 10.0, 1.0, 0.0)
    assert slowness(speeds) is None


def test_a_bad_hour_is_forgotten() -> None:
    speeds = noted(1.0, 1.0, 20.0)
    assert slowness(speeds) is not None
    for _ in range(MIN_TIMES):
        speeds.note(0, 1.0, 1.0, MEMORY_S + 20.0)
    assert slowness(speeds, MEMORY_S + 30.0) is None


def test_a_replica_that_joins_counts_as_typical_whoever_had_its_index() -> None:
    speeds = noted(1.0, 1.0, 20.0)
    assert slowness(speeds) == [1.0, 1.0, 20.0]
    speeds.remove_replica(2)
    assert speeds.slowness == [1.0, 1.0, 1.0]
    speeds.add_replica(3)
    assert speeds.slowness == [1.0, 1.0, 1.0, 1.0]


def test_a_replica_that_gets_little_done_of_a_long_queue_is_slow() -> None:
    speeds = noted(1.0, 1.0)
    for step in range(1, 12):
        speeds.note_prefill_done(2, 0.5)
        speeds.update(5.0 * step, [0.0, 0.0, 60.0])
    assert speeds.slowness == [1.0, 1.0, pytest.approx(10.0)]


def simulated(**speeds: float) -> SimResult:
    workload = WorkloadPlan(source="multiturn", requests=600, rps=20.0, seed=3).make()
    profile = load_profile("a6000-mistral-7b")
    return Simulation(SimConfig(profile=profile, replicas=4, seed=1, speeds=speeds), workload).run()


def test_of_four_replicas_one_that_is_ten_times_slower_gets_little() -> None:
    """The requests before anything was learned are among them; by its speed it is due 0.03."""
    requests = simulated(r0=0.1).summary.requests_per_replica
    assert requests["r0"] < 0.06 * sum(requests.values())
