"""When load moves: redirects, replication, retirement, prefill/decode balance."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from preble.core.cluster.load_window import LoadWindow
from preble.core.costs.model import CostModel, CostProfile
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.e2.rebalance import Rebalancer, RebalanceSettings
from preble.core.prefixes.radix_tree import Node, RadixTree
from preble.core.types import Reason, ReplicaId, Request, RequestId, pack_tokens
from support.by_hand import A, B, run_of, scheduler_of

# One token costs 1 ms to prefill, an output token 1 ms to decode.
MODEL = CostModel(CostProfile("unit", "made up", ((0, 0.0), (1000, 1.0)), 0.0, 0.0, 0.0, 0.0, 10_000))
WINDOW_S = 100.0


@dataclass
class FakeCluster:
    """The seam of the search: loads by slot, holders and requests by node."""

    load_s: Sequence[float]
    held_by: dict[Node, list[int]] = field(default_factory=dict)
    requests: dict[Node, int] = field(default_factory=dict)

    @property
    def eligible_replicas(self) -> Sequence[int]:
        return range(len(self.load_s))

    def recompute_s(self, node: Node) -> float:
        return node.end / 1000

    def holders(self, node: Node) -> list[int]:
        return self.held_by.get(node, [])

    def window_requests(self, node: Node) -> int:
        return self.requests.get(node, 0)

    def load_below(self, node: Node) -> dict[Node, float]:
        return {child: float(count) for child, count in self.requests.items() if child.parent is node}


def rebalancer() -> Rebalancer:
    return Rebalancer(RebalanceSettings(min_requests=4), WINDOW_S)


def prefix_with_children() -> tuple[Node, list[Node]]:
    tree = RadixTree()
    children = [tree.insert(pack_tokens([*range(100), branch, *range(50)]))[-1] for branch in (1001, 1002, 1003)]
    parent = children[0].parent
    assert parent is not None
    return parent, children


def queue(made: Rebalancer, node: Node, seconds: Sequence[float], start: float) -> None:
    for i, queueing_s in enumerate(seconds):
        made.note_queueing(node, queueing_s, start + i, 0b1111)


def test_shedding_starts_at_the_threshold_and_stops_at_the_calm_ratio() -> None:
    made = rebalancer()
    assert [made.sheds(0, load, 1.0) for load in (1.4, 1.6, 1.4, 1.3, 1.2, 1.4)] == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]


def test_a_prefix_whose_queueing_doubles_gets_the_lightest_replica_as_a_further_replica() -> None:
    made, (node, _) = rebalancer(), prefix_with_children()
    queue(made, node, [0.2] * 4, start=0.0)
    queue(made, node, [0.5] * 4, start=50.0)
    cluster = FakeCluster([9.0, 3.0, 1.0], {node: [0]})
    (change,) = made.search(cluster, 60.0)
    assert (change.node, change.replica, change.added) == (node, 2, True)
    assert made.replicas_of([node]) == (node, [0, 2])


@pytest.mark.parametrize(
    ("before", "after", "loads"),
    [
        ([0.4] * 4, [0.5] * 4, [9.0, 1.0]),  # has not doubled
        ([0.01] * 4, [0.05] * 4, [9.0, 1.0]),  # waiting is cheaper than computing the prefix, which takes 0.1 s
        ([0.2] * 4, [0.5] * 3, [9.0, 1.0]),  # too few to tell
        ([0.2] * 4, [0.5] * 4, [1.0, 9.0]),  # nobody is lighter
    ],
)
def test_a_prefix_is_not_replicated_without_need(before: list[float], after: list[float], loads: list[float]) -> None:
    made, (node, _) = rebalancer(), prefix_with_children()
    queue(made, node, before, start=0.0)
    queue(made, node, after, start=50.0)
    assert made.search(FakeCluster(loads, {node: [0]}), 60.0) == []
    assert made.replicas_of([node]) is None


def test_what_lies_below_a_replicated_prefix_is_split_by_load() -> None:
    made, (node, children) = rebalancer(), prefix_with_children()
    queue(made, node, [0.5] * 4, start=0.0)
    requests = dict(zip(children, (10, 6, 5), strict=True))
    cluster = FakeCluster([9.0, 1.0], {node: [0], **{child: [0] for child in children}}, requests)
    made.search(cluster, 10.0)
    served_by = {child: made.replicas_of([node, child]) for child in children}
    assert [served_by[child] for child in children] == [(node, [0]), (node, [1]), (node, [1])]


def test_a_cooled_prefix_loses_its_latest_replica_but_not_its_first() -> None:
    made, (node, _) = rebalancer(), prefix_with_children()
    queue(made, node, [0.5] * 10, start=0.0)
    made.search(FakeCluster([9.0, 1.0], {node: [0]}), 10.0)
    queue(made, node, [0.0] * 2, start=70.0)
    (change,) = made.search(FakeCluster([1.0, 1.0], {node: [0, 1]}), 120.0)
    assert (change.replica, change.added) == (1, False)
    assert made.replicas_of([node]) == (node, [0])


def test_of_all_that_queues_on_a_replica_only_what_queued_longest_is_replicated_at_once() -> None:
    """An overloaded replica makes all its prefixes queue; to spread them all would help no more than to spread one."""
    made, (_, children) = rebalancer(), prefix_with_children()
    hot, cool = children[:2]
    queue(made, cool, [0.5] * 4, start=0.0)
    queue(made, hot, [0.5] * 8, start=0.0)
    cluster = FakeCluster([9.0, 1.0, 2.0], {hot: [0], cool: [0]})
    assert [(change.node, change.replica) for change in made.search(cluster, 10.0)] == [(hot, 1)]


def test_after_a_change_only_requests_placed_since_count_as_queueing() -> None:
    made, (_, children) = rebalancer(), prefix_with_children()
    hot, cool = children[:2]
    queue(made, cool, [0.5] * 4, start=0.0)
    queue(made, hot, [0.5] * 8, start=0.0)
    cluster = FakeCluster([9.0, 1.0, 2.0], {hot: [0], cool: [0]})
    made.search(cluster, 10.0)
    queue(made, cool, [3.0] * 2, start=11.0)  # placed before the change, at 8 and 9 s
    queue(made, cool, [0.5] * 3, start=13.0)
    assert made.search(cluster, 16.0) == []
    queue(made, cool, [0.5], start=17.0)
    assert [change.node for change in made.search(cluster, 18.0)] == [cool]


def test_without_replication_no_prefix_is_watched() -> None:
    made, (node, _) = Rebalancer(RebalanceSettings(min_requests=4, replicate=False), WINDOW_S), prefix_with_children()
    queue(made, node, [0.5] * 8, start=0.0)
    assert made.next_search() is None


def test_a_prefix_that_nobody_asks_for_is_forgotten() -> None:
    made, (node, _) = rebalancer(), prefix_with_children()
    queue(made, node, [0.5] * 10, start=0.0)
    made.search(FakeCluster([9.0, 1.0], {node: [0]}), 10.0)
    made.search(FakeCluster([0.0, 0.0]), 10.0 + 2 * WINDOW_S)
    assert (made.replicas_of([node]), made.next_search()) == (None, None)


def test_a_removed_replica_serves_no_prefix() -> None:
    made, (node, _) = rebalancer(), prefix_with_children()
    queue(made, node, [0.5] * 10, start=0.0)
    made.search(FakeCluster([9.0, 1.0], {node: [0]}), 10.0)
    made.remove_replica(1)
    assert made.replicas_of([node]) == (node, [0])


# -- through the scheduler's door -------------------------------------------------------------------------------------


def scheduler(policy: str, count: int = 4, *, block_size: int = 1) -> GlobalScheduler:
    return scheduler_of(policy, *(f"r{i}" for i in range(count)), model=MODEL, block_size=block_size)


def burst(made: GlobalScheduler, count: int, shared: int, unique: int) -> Counter[tuple[ReplicaId, Reason]]:
    prefix = run_of(0, shared)
    placed: Counter[tuple[ReplicaId, Reason]] = Counter()
    for i in range(count):
        placement = made.place(Request.of(f"q{i}", prefix + run_of(i + 1, unique)), 0.0)
        placed[placement.replica_id, placement.reason] += 1
    return placed


def test_a_burst_on_one_cold_prefix_is_redirected_before_anything_answers() -> None:
    """Complaint 3 of other routers' users: load counts when a request is placed, not when its answer starts."""
    placed = burst(scheduler("e2"), 256, shared=1000, unique=100)
    assert len({replica for replica, _ in placed}) == 4
    assert sum(count for (_, reason), count in placed.items() if reason is Reason.REDIRECT) == 3


def test_without_rebalancing_the_burst_stays_together() -> None:
    placed = burst(scheduler("e2_per_request"), 256, shared=1000, unique=100)
    assert len({replica for replica, _ in placed}) == 1


def test_without_rebalancing_no_prefix_is_replicated() -> None:
    made = scheduler("e2_per_request")
    burst(made, 10, shared=1000, unique=10)
    for i in range(10):
        made.on_first_token(RequestId(f"q{i}"), 60.0)
    assert made.on_timer(70.0) == []


def test_a_replicated_prefix_is_announced_with_its_length() -> None:
    made = scheduler("e2")
    burst(made, 10, shared=1000, unique=10)
    for i in range(10):
        made.on_first_token(RequestId(f"q{i}"), 60.0)
    (change,) = made.on_timer(70.0)
    assert (change.prefix_tokens, change.added, change.num_replicas) == (1000, True, 2)


def test_nobody_waiting_means_no_redirect() -> None:
    """However uneven the history is, a hit on an idle replica stays a hit."""
    made = scheduler("e2")
    prefix = run_of(0, 1000)
    replicas = set()
    for i in range(50):
        placement = made.place(Request.of(f"q{i}", prefix + run_of(i + 1, 100)), float(i))
        made.on_finish(RequestId(f"q{i}"), 5, float(i) + 0.5)
        replicas.add(placement.replica_id)
    assert len(replicas) == 1


PROFILE_OF_DECODES = CostProfile(
    "unit", "made up", ((0, 0.0), (1000, 1.0)), 0.0, 0.016, 0.0, 0.0, 10_000, typical_batch=1
)


def decode_heavy(policy: str) -> tuple[GlobalScheduler, ReplicaId]:
    """Two replicas; one has had nothing but answers, the other, with less work in all, mostly a prompt.

    A decode iteration of one sequence takes as long as 16 prompt tokens, so 15 can be computed for nothing.
    """
    made = scheduler_of(policy, A, B, model=CostModel(PROFILE_OF_DECODES))
    answers = [(f"long answer {i}", A, 10, 60) for i in range(3)]
    for request_id, replica, prompt, output in [*answers, ("long prompt", B, 1200, 10)]:
        made.place(Request.of(request_id, run_of(ord(request_id[-1]), prompt)), 0.0)
        made.move(RequestId(request_id), replica, 0.0)
        made.on_finish(RequestId(request_id), output, 0.0)
    return made, A


def test_what_must_be_computed_goes_to_a_replica_that_mostly_decodes() -> None:
    made, decoding = decode_heavy("e2")
    placement = made.place(Request.of("q", run_of(1, 50)), 1.0)
    assert (placement.replica_id, placement.reason) == (decoding, Reason.BALANCE)


def test_where_all_replicas_decode_alike_the_costs_decide() -> None:
    made = scheduler_of("e2", A, B, model=CostModel(PROFILE_OF_DECODES))
    for i, prompt in enumerate((12, 10)):
        request_id = RequestId(f"answer {i}")
        made.place(Request.of(request_id, run_of(10 + i, prompt)), 0.0)
        made.move(request_id, ReplicaId("ab"[i]), 0.0)
        made.on_finish(request_id, 60, 0.0)
    placement = made.place(Request.of("q", run_of(1, 50)), 1.0)
    assert (placement.replica_id, placement.reason) == (ReplicaId("b"), Reason.EXPLORE)


def test_imbalr_is_the_share_of_decoding_that_leaves_no_compute_idle() -> None:
    # 16 ms an iteration of one sequence; 15 prompt tokens more, of 1 ms each, take no longer.
    assert CostModel(PROFILE_OF_DECODES).balanced_decode_ratio() == pytest.approx(16 / 31)
    busy = dataclasses.replace(PROFILE_OF_DECODES, decode_base_s=0.001)
    assert CostModel(busy).balanced_decode_ratio() == 1.0


def test_an_answer_of_which_only_the_end_is_seen_says_nothing_of_queueing() -> None:
    """16 requests that share a prefix and are answered at once, streamed or not; decoding takes long."""

    def replications(streamed: bool) -> int:
        policy = "e2?min_requests=4&interval_s=1"
        made = scheduler_of(policy, A, B, model=CostModel(PROFILE_OF_DECODES), settings={"window_s": 40.0})
        changes = 0
        for i in range(16):
            made.place(Request.of(f"q{i}", [*range(200), 1000 + i]), float(i))
            if streamed:
                made.on_first_token(RequestId(f"q{i}"), i + 0.001)
            made.on_finish(RequestId(f"q{i}"), 50, i + 0.9)
            changes += len(made.on_timer(i + 0.95))
        return changes

    assert replications(streamed=True) == replications(streamed=False) == 0


def test_a_split_subtree_counts_by_the_work_of_its_requests() -> None:
    """One long request to one child weighs more than three short ones to another (Algorithm 2)."""
    window, tree = LoadWindow(CostModel(PROFILE_OF_DECODES)), RadixTree()
    window.add_replica(0)
    children = [tree.insert(pack_tokens([*range(100), branch, 7]))[-1] for branch in (1001, 1002)]
    beside = tree.insert(pack_tokens([5]))[-1]
    for child, prefill_s in ((children[0], 5.0), *[(children[1], 0.1)] * 3, (beside, 9.0)):
        window.add(0, 0.0, prefill_s, 102, child)
    assert children[0].parent is not None
    load_s = window.load_below(children[0].parent)
    assert list(load_s) == children
    assert load_s[children[0]] > load_s[children[1]] > 0.3


def test_without_the_balance_it_goes_where_the_load_is_lowest() -> None:
    made, decoding = decode_heavy("e2_rebalance")
    placement = made.place(Request.of("q", run_of(1, 50)), 1.0)
    assert (placement.replica_id == decoding, placement.reason) == (False, Reason.EXPLORE)
