"""Replicas of different speed: what is learned of them from live requests, and what becomes of it."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from random import Random

import pytest

from preble.core.cluster.load_window import WindowEntry
from preble.core.cluster.replicas import InFlightRequest
from preble.core.cluster.speeds import MEMORY_S, MIN_OF_KIND, MIN_TIMES, NUM_TIMES, ReplicaSpeeds
from preble.core.cluster.state import ClusterState
from preble.core.costs.model import CostModel, CostProfile
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.placing.timing_samples import TimingSamples
from preble.core.policies.registry import make_policy
from preble.core.prefixes.radix_tree import Root
from preble.core.replica_index import ReplicaIndex
from preble.core.types import Placement, ReplicaId, ReplicaSpec, Request, RequestId
from preble.decisions.settings import make_scheduler
from preble.lab.sim.config import SimConfig
from preble.lab.sim.result import SimResult
from preble.lab.sim.simulation import Simulation
from preble.lab.workloads.model import Segment, Workload, WorkloadRequest
from preble.lab.workloads.plan import WorkloadPlan
from preble.lab.workloads.trace import made_up_tokens
from preble.profiles import load_profile


def noted(*seconds: float, now: float = 0.0) -> ReplicaSpeeds:
    """Replica i takes `seconds[i]` for what should take a second."""
    speeds = ReplicaSpeeds()
    for replica, measured_s in enumerate(seconds):
        speeds.add_replica(replica)
        for _ in range(MIN_TIMES):
            speeds.note(replica, measured_s, 1.0, now)
    return speeds


def slowness(speeds: ReplicaSpeeds, now: float = 10.0) -> list[float] | None:
    speeds.update(now)
    return speeds.slowness


def test_a_slow_replica_is_found_by_its_times_relative_to_the_others() -> None:
    assert slowness(noted(2.0, 20.0, 2.1)) == [1.0, pytest.approx(20 / 2.1), 1.0]


def test_a_profile_that_is_wrong_for_all_alike_makes_none_slow() -> None:
    assert slowness(noted(5.0, 5.5, 6.0)) is None


@pytest.mark.parametrize("pace", [0.25, 4.0])
def test_decodes_that_are_off_for_all_alike_do_not_slow_a_replica_with_more_of_them(pace: float) -> None:
    speeds = ReplicaSpeeds()
    for replica, decodes in enumerate((3, 2, 1)):
        for i in range(MIN_OF_KIND):
            is_decode = i % 4 < decodes
            speeds.note(replica, pace if is_decode else 1.0, 1.0, 0.0, is_decode=is_decode)
    assert slowness(speeds) is None
    assert speeds.decode_pace == pace


@pytest.mark.parametrize(("decode", "prefill"), [(0.6, 1.1), (0.6, 3.0), (3.0, 3.0), (0.3, 0.3)])
def test_decodes_as_predicted_or_as_far_off_as_prefills_are_left_as_they_are(decode: float, prefill: float) -> None:
    speeds = ReplicaSpeeds()
    for _ in range(MIN_OF_KIND):
        speeds.note(0, decode, 1.0, 0.0, is_decode=True)
        speeds.note(0, prefill, 1.0, 0.0, is_decode=False)
    speeds.update(10.0)
    assert speeds.decode_pace == 1.0


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


def test_times_that_the_latest_contradict_are_forgotten_at_once() -> None:
    speeds = noted(1.0, 1.0, 20.0)
    for _ in range(NUM_TIMES):
        speeds.note(2, 20.0, 1.0, 0.0)
    assert slowness(speeds) == [1.0, 1.0, 20.0]
    for _ in range(MIN_TIMES):
        speeds.note(2, 1.0, 1.0, 11.0)
    assert slowness(speeds, 20.0) is None


class Queue:
    """Prompts that one replica computes beside two usual ones. `speeds`: of the three."""

    def __init__(self) -> None:
        cluster = ClusterState(CostModel(load_profile("a6000-mistral-7b")), 180.0)
        self.speeds = cluster.speeds = noted(1.0, 1.0)
        for name in "abc":
            cluster.add_replica(ReplicaSpec(ReplicaId(name)))
        self._timing = TimingSamples(cluster, None)

    def computes(self, placed_at: float, predicted_s: float, now: float, *, seen: bool = True) -> None:
        window_entry = WindowEntry(ReplicaIndex(2), placed_at, predicted_s, 1, Root(""))
        entry = InFlightRequest(Request.of("r", [1]), ReplicaIndex(2), placed_at, Root(""), window_entry, 1)
        self._timing.placed(entry)
        self._timing.first_token(entry, now, seen=seen)


def queued(predicted_s: float, measured_s: float) -> ReplicaSpeeds:
    """Two usual replicas, and one that computes one prompt after the other for two minutes."""
    queue = Queue()
    for step in range(1, int(120 / measured_s)):
        queue.computes(0.0, predicted_s, step * measured_s)
        queue.speeds.update(step * measured_s)
    return queue.speeds


def test_a_replica_that_gets_little_done_of_a_long_queue_is_slow() -> None:
    assert queued(0.5, 5.0).slowness == [1.0, 1.0, pytest.approx(10.0)]


@pytest.mark.parametrize("prompt_s", [0.1, 1.0, 6.0, 20.0])
def test_a_long_queue_that_is_done_as_predicted_makes_nobody_slow(prompt_s: float) -> None:
    assert queued(prompt_s, prompt_s).slowness is None


def test_time_in_which_a_replica_may_have_had_nothing_to_compute_does_not_count() -> None:
    queue = Queue()
    for step in range(20):
        queue.computes(10.0 * step + 9.5, 0.5, 10.0 * step + 10.0)
    assert slowness(queue.speeds, 200.0) is None


def test_a_prompt_of_an_answer_that_is_not_streamed_counts_as_done_and_ends_nothing() -> None:
    queue = Queue()
    for step in range(1, 12):
        queue.computes(0.0, 4.5, 5.0 * step, seen=False)
        queue.computes(0.0, 0.5, 5.0 * step)
    assert slowness(queue.speeds, 60.0) is None
    for step in range(20, 40):
        queue.computes(0.0, 0.1, 5.0 * step, seen=False)
    assert slowness(queue.speeds, 210.0) is None


def simulated(**speeds: float) -> SimResult:
    workload = WorkloadPlan(source="multiturn", requests=600, rps=20.0, seed=3).make()
    profile = load_profile("a6000-mistral-7b")
    return Simulation(SimConfig(profile=profile, replicas=4, seed=1, speeds=speeds), workload).run()


@pytest.mark.parametrize("prompt_tokens", [30_000, 150_000])
def test_equal_replicas_that_compute_long_prompts_stay_equal(prompt_tokens: int) -> None:
    """A prompt of 150,000 tokens takes 39 s; the short ones beside it decode behind its context."""
    rng = Random(5)
    documents = [Segment(f"d{i}", tokens=made_up_tokens(f"d{i}", prompt_tokens)) for i in range(3)]
    requests, now = [], 0.0
    for i in range(150):
        now += rng.expovariate(0.9)
        question = Segment(tokens=made_up_tokens(f"q{i}", 700))
        segments = (rng.choice(documents), question) if i % 6 == 0 else (question,)
        requests.append(WorkloadRequest(f"q{i}", segments, 100, arrival_s=now))
    config = SimConfig(profile=load_profile("a6000-mistral-7b"), replicas=3)
    scheduler = make_scheduler(config.scheduler_settings, config.profile)
    learned: set[float] = set()

    def note(placement: Placement, now: float) -> None:
        learned.update(scheduler._cluster.speeds.slowness or ())

    Simulation(config, Workload("long", tuple(requests)), scheduler=scheduler, on_placement=note).run()
    assert max(learned, default=1.0) < 2.0


def test_of_four_replicas_one_that_is_ten_times_slower_gets_little() -> None:
    """The requests before anything was learned are among them; by its speed it is due 0.03."""
    requests = simulated(r0=0.1).summary.requests_per_replica
    assert requests["r0"] < 0.06 * sum(requests.values())


def shares_of(policy: str, bad_until_s: float, until_s: float, counted_from_s: float) -> dict[str, float]:
    """Three replicas, of which `r0` takes 20 times as long until `bad_until_s`; each one's share of the requests after
    `counted_from_s`. Every replica computes one prompt of 100 ms after the other."""
    profile = CostProfile("unit", "made up", ((0, 0.0), (1000, 0.1)), 0.0, 0.001, 0.0, 0.0, 1_000_000)
    made = GlobalScheduler(make_policy(policy), CostModel(profile))
    for name in ("r0", "r1", "r2"):
        made.add_replica(ReplicaSpec(ReplicaId(name)), 0.0)
    free_at = dict.fromkeys(("r0", "r1", "r2"), 0.0)
    due: list[tuple[float, RequestId]] = []
    counts: Counter[str] = Counter()
    for i in range(int(until_s * 4)):
        now = i / 4
        while due and due[0][0] <= now:
            at, request_id = heappop(due)
            made.on_first_token(request_id, at)
            made.on_finish(request_id, 2, at)
        made.on_timer(now)
        request = Request.of(f"q{i}", range(i * 1000, i * 1000 + 1000))
        replica = made.place(request, now).replica_id
        free_at[replica] = max(free_at[replica], now) + (2.0 if replica == "r0" and now < bad_until_s else 0.1)
        heappush(due, (free_at[replica], request.request_id))
        counts[replica] += now >= counted_from_s
    return {replica: counts[replica] / counts.total() for replica in free_at}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["preble", "e2"])
def test_no_replica_is_starved_for_ever_by_a_bad_hour(policy: str) -> None:
    assert shares_of(policy, bad_until_s=400.0, until_s=400.0, counted_from_s=200.0)["r0"] < 0.15
    recovered_s = 400.0 + MEMORY_S
    assert shares_of(policy, 400.0, recovered_s + 400.0, recovered_s + 200.0)["r0"] > 0.25
