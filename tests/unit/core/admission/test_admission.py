"""Whose turn it is at the way to the fleet, and when there is room."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest

from preble.core.admission.admission import FairAdmission
from preble.core.admission.fair_queue import FairQueue, QueueSettings, Waiting
from preble.core.admission.gate import Gate
from preble.core.costs.model import CostModel, CostProfile
from preble.core.types import Placement, Reason, ReplicaId, RequestId

PROFILE = CostProfile("test", "made up", ((0, 0.0), (1000, 1.0)), 0.0, 0.01, 0.0, 0.0, 100_000)
"""A prompt token takes a millisecond."""
A, B = ReplicaId("a"), ReplicaId("b")


class Driver:
    """Offers requests and places what is called up, all of it on one replica."""

    def __init__(self, settings: QueueSettings | None = None, depth_s: float = 0.1) -> None:
        self.admission = FairAdmission(CostModel(PROFILE), settings, depth_s=depth_s)
        self.admission.add_replica(A)
        self.now = 0.0
        self.placed: list[RequestId] = []
        self.refused: dict[RequestId, float] = {}
        self.tokens: dict[RequestId, int] = {}
        self._ids = count()

    def offer(self, tenant: str, times: int = 1, tokens: int = 100, rank: int = 0, max_wait_s: float = 1e9) -> None:
        for _ in range(times):
            request = RequestId(f"{tenant}{next(self._ids)}")
            self.tokens[request] = tokens
            refused = self.admission.offer(request, tenant, tokens, self.now, rank=rank, max_wait_s=max_wait_s)
            self.refused |= {refusal.request_id: refusal.retry_after_s for refusal in refused}
            self.place()

    def place(self, cached: int = 0) -> None:
        while (request := self.admission.next(self.now)) is not None:
            self.placed.append(request)
            placement = Placement(request, A, Reason.POLICY, cached, self.tokens[request])
            self.admission.placed(placement, request[0], self.now)

    def serve(self, seconds: float) -> None:
        """The replica computes prompts, one after the other, for about so long."""
        end = self.now + seconds
        while self.now < end and (running := [r for r in self.placed if r in self.tokens]):
            self.now += self.tokens.pop(running[0]) / 1000
            self.admission.first_token(running[0])
            self.admission.ended(running[0], 0)
            self.place()


def served(driver: Driver) -> Counter[str]:
    return Counter(request[0] for request in driver.placed)


def test_requests_go_at_once_while_there_is_room() -> None:
    driver = Driver()
    driver.offer("x", 1)
    assert driver.placed == ["x0"]
    driver.offer("x", 1)
    assert driver.placed == ["x0"], "as much as the depth is waiting inside the replica"
    driver.serve(0.1)
    assert driver.placed == ["x0", "x1"]


def test_a_flood_leaves_the_other_tenant_its_half() -> None:
    driver = Driver()
    driver.offer("f", 400)
    driver.offer("v", 100)
    driver.serve(10.0)
    assert abs(served(driver)["f"] - served(driver)["v"]) <= 2


def test_a_tenant_of_twice_the_weight_gets_twice_as_much() -> None:
    driver = Driver()
    driver.admission.set_weight("v", 2.0)
    driver.offer("f", 400)
    driver.offer("v", 400)
    driver.serve(15.0)
    assert served(driver)["v"] == pytest.approx(2 * served(driver)["f"], abs=3)


def test_who_shares_a_cached_prefix_pays_for_the_rest_only() -> None:
    admission = FairAdmission(CostModel(PROFILE))
    admission.add_replica(A)
    for tenant, cached in (("x", 0), ("y", 900)):
        before = admission.used_s(tenant)
        admission.offer(RequestId(tenant), tenant, 1000, 0.0)
        request = admission.next(0.0)
        assert request is not None
        admission.placed(Placement(request, A, Reason.POLICY, cached, 1000), tenant, 0.0)
        admission.ended(request, 0)
        assert admission.used_s(tenant) - before == pytest.approx((1000 - cached) / 1000)


def test_what_was_generated_is_paid_for() -> None:
    driver = Driver()
    driver.offer("x")
    driver.admission.ended(driver.placed[0], 50)
    decode_s = CostModel(PROFILE).decode_s(50, 100)
    assert decode_s > 0
    assert driver.admission.used_s("x") == pytest.approx(0.1 + decode_s)


def test_a_new_name_brings_no_credit() -> None:
    driver = Driver()
    driver.offer("f", 400)
    driver.serve(10.0)
    before = served(driver)["f"]
    for name in "abcdeghijk":
        driver.offer(name, 20)
    driver.serve(11.0)
    assert served(driver)["f"] - before == pytest.approx(10, abs=3), "one of eleven tenants"


def test_a_tenant_that_was_away_catches_up_its_credit_and_no_more() -> None:
    driver = Driver(QueueSettings(credit_s=2.0))
    driver.offer("v", 1)
    driver.offer("f", 1000)
    driver.serve(50.0)
    driver.offer("v", 200)
    before = served(driver)
    driver.serve(10.0)
    now = served(driver)
    assert now["v"] - before["v"] == pytest.approx(60, abs=5), "2 s of credit, then half of 8 s, at 0.1 s each"


def test_a_tenant_that_asked_little_while_nobody_waited_has_its_credit_for_a_burst() -> None:
    driver = Driver(QueueSettings(credit_s=1.0))
    for _ in range(10):  # a tenth of what the replica can do
        driver.offer("v")
        driver.serve(0.1)
        driver.now += 0.9
    driver.offer("f", 400)
    driver.offer("v", 30)
    before = served(driver)["v"]
    driver.serve(2.0)
    assert 14 <= served(driver)["v"] - before <= 17, "its half of two seconds, and as much again as half of its credit"


def test_a_lower_rank_goes_first() -> None:
    driver = Driver()
    driver.offer("x", 3, rank=1)
    driver.offer("x", 1, rank=0)
    driver.serve(0.2)
    assert driver.placed[:2] == ["x0", "x3"]


def test_a_request_that_cannot_make_its_time_is_refused_at_once() -> None:
    driver = Driver()
    driver.offer("x", 100)
    driver.serve(5.0)
    driver.offer("x", 1, max_wait_s=1.0)
    [(request, retry_after_s)] = driver.refused.items()
    assert request == "x100"
    assert 1.0 < retry_after_s < 60.0
    driver.offer("y", 1, max_wait_s=1.0)
    assert list(driver.refused) == ["x100"], "another tenant has its own time"


def test_a_request_whose_time_has_come_waits_no_longer() -> None:
    driver = Driver(QueueSettings(max_wait_s=3.0))
    driver.offer("x", 2)
    assert driver.admission.next_timer(0.0) == 3.0
    assert driver.admission.expire(2.9) == []
    assert [refusal.request_id for refusal in driver.admission.expire(3.0)] == ["x1"]
    assert driver.admission.num_waiting == 0
    assert driver.admission.next_timer(3.0) is None


def test_a_full_queue_costs_the_greediest_tenant_its_newest() -> None:
    driver = Driver(QueueSettings(max_waiting=10))
    driver.offer("f", 11)
    assert not driver.refused
    driver.offer("v", 1)
    assert list(driver.refused) == ["f10"]


def test_a_withdrawn_request_is_not_called_up() -> None:
    driver = Driver()
    driver.offer("x", 3)
    driver.admission.withdraw(RequestId("x1"))
    driver.serve(1.0)
    assert driver.placed == ["x0", "x2"]


def test_a_request_that_moves_is_charged_to_its_tenant_again() -> None:
    driver = Driver()
    driver.offer("x")
    driver.admission.add_replica(B)
    driver.admission.placed(Placement(RequestId("x0"), B, Reason.POLICY, 0, 100), "x", 0.0)
    assert driver.admission.used_s("x") == pytest.approx(0.2)
    driver.admission.ended(RequestId("x0"), 0)
    driver.admission.ended(RequestId("x0"), 0)


def test_full_replicas_of_one_model_do_not_hold_up_another() -> None:
    queue = FairQueue(QueueSettings())
    for number, where in enumerate([A, A, B]):
        entry = Waiting(RequestId(str(number)), "x", 1.0, number, 1e9, kind=frozenset({where}))
        assert queue.offer(entry, 0.0) == []
    chosen = queue.next(lambda waiting, owed: waiting.kind == {B})
    assert chosen is not None
    assert chosen.request_id == "2"


def test_a_replica_that_lets_one_wait_too_long_has_no_room() -> None:
    gate = Gate(0.1)
    gate.add_replica(A)
    gate.sent(A, RequestId("x"), "t", 0.01, 0.0, streams=True)
    assert gate.has_room(None, 0.4)
    assert not gate.has_room(None, 0.5)
    gate.prefilled(A, RequestId("x"))
    assert gate.has_room(None, 0.5)


def test_an_answer_that_nobody_reports_counts_as_begun_in_turn() -> None:
    gate = Gate(0.1)
    gate.add_replica(A)
    gate.sent(A, RequestId("x"), "t", 0.2, 0.0, streams=False)
    assert gate.next_assumption(0.0) == 0.2
    assert not gate.has_room(None, 0.1)
    assert gate.has_room(None, 0.2)


def test_a_time_at_which_an_answer_counts_as_begun_is_never_past() -> None:
    gate = Gate(0.1)
    gate.add_replica(A)
    gate.add_replica(B)
    gate.sent(A, RequestId("told"), "t", 0.2, 0.0, streams=True)
    gate.sent(A, RequestId("behind"), "t", 0.2, 0.0, streams=False)
    gate.sent(B, RequestId("elsewhere"), "t", 0.6, 0.0, streams=False)
    assert not gate.has_room(frozenset({A}), 0.5)
    assert gate.next_assumption(0.5) == 0.6
    assert not gate.has_room(frozenset({A}), 0.7), "nothing asks about the other replica"
    assert gate.next_assumption(0.7) is None


def test_behind_one_long_request_nobody_is_refused_before_anything_is_known() -> None:
    driver = Driver()
    driver.offer("x", tokens=50_000)
    for driver.now in (0.1, 1.2, 1.3):
        driver.offer("x", max_wait_s=60.0)
    assert driver.refused == {}
    assert driver.admission.num_waiting == 3


def test_behind_one_long_request_that_followed_a_short_one_nobody_is_refused() -> None:
    driver = Driver(depth_s=0.001)
    driver.offer("x", 2, tokens=10)
    driver.offer("x", tokens=20_000)
    for driver.now, request in ((0.01, "x0"), (1.5, "x1")):
        driver.admission.first_token(RequestId(request))
        driver.place()
    assert driver.placed[-1] == "x2"
    for driver.now in (2.0, 12.0):
        driver.offer("x", max_wait_s=20.0)
    assert driver.refused == {}


def test_while_two_tenants_ask_the_one_that_used_more_has_one_request_at_a_time_inside() -> None:
    driver = Driver(depth_s=1.0)
    driver.offer("y", tokens=1)
    driver.admission.first_token(RequestId("y0"))
    driver.offer("x", 5)
    assert driver.placed == ["y0", "x1"]
    driver.admission.first_token(RequestId("x1"))
    driver.place()
    assert driver.placed == ["y0", "x1", "x2"]
    driver.admission.ended(RequestId("y0"), 0)
    driver.place()
    assert driver.placed[3:] == ["x3", "x4", "x5"], "a tenant that asks alone fills the replica up to its depth"


def test_nobody_is_told_to_stay_away_for_longer_than_anybody_may_wait() -> None:
    driver = Driver(QueueSettings(max_wait_s=60.0))
    driver.offer("x", 100)
    driver.serve(5.0)
    driver.offer("x", tokens=1_000_000)
    assert list(driver.refused.values()) == [60.0]
