"""Which replicas requests keep away from: each rule by an example of its own."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest

from preble.config import EjectionConfig
from preble.core.types import ReplicaId, RequestId
from preble.rules.ejection import LONGEST_LONE_HOLD_S, Change, EjectionReason, EjectionTable, Standing

CONFIG = EjectionConfig()
NAMES = [ReplicaId(f"r{i}") for i in range(4)]
BAD, *GOOD = NAMES


class Fleet:
    """A table with replicas that all serve the same, and the changes that it has reported."""

    def __init__(self, config: EjectionConfig = CONFIG, names: list[ReplicaId] = NAMES) -> None:
        self.changes: list[Change] = []
        self.table = EjectionTable(config, self.changes.append)
        self.now = 100.0
        self._ids = (RequestId(str(i)) for i in count())
        for name in names:
            self.table.add(name)

    def send(self, replica: ReplicaId, expected_s: float = 1.0, *, streams: bool = True) -> RequestId:
        request = next(self._ids)
        self.table.sent(replica, request, self.now, expected_s, streams=streams)
        return request

    def fail(self, replica: ReplicaId, times: int = 1) -> None:
        for _ in range(times):
            self.table.failed(replica, self.send(replica), self.now)

    def succeed(self, replica: ReplicaId, times: int = 1, took_s: float = 0.0, expected_s: float = 1.0) -> None:
        for _ in range(times):
            request = self.send(replica, expected_s)
            self.now += took_s
            self.table.heard(replica, request, self.now)
            self.table.succeeded(replica, request, self.now)

    @property
    def avoided(self) -> frozenset[ReplicaId]:
        return self.table.avoided(self.now)

    def check(self, **last_heard: float) -> list[ReplicaId]:
        return self.table.check({ReplicaId(name): at for name, at in last_heard.items()}, self.now)


def test_failures_in_a_row_eject() -> None:
    fleet = Fleet()
    fleet.fail(BAD, CONFIG.consecutive_failures - 1)
    assert fleet.avoided == frozenset()
    fleet.fail(BAD)
    assert fleet.avoided == {BAD}
    assert fleet.changes == [Change(BAD, Standing.EJECTED, EjectionReason.CONSECUTIVE_FAILURES, CONFIG.first_out_s)]


def test_a_success_begins_the_row_again() -> None:
    fleet = Fleet()
    for _ in range(2):
        fleet.fail(BAD, CONFIG.consecutive_failures - 1)
        fleet.succeed(BAD)
    assert fleet.avoided == frozenset()


@pytest.mark.parametrize("others_fail_too", [False, True])
def test_a_failure_rate_far_above_the_others_ejects(others_fail_too: bool) -> None:
    fleet = Fleet()
    for _ in range(CONFIG.min_requests):
        for replica in NAMES:
            fleet.succeed(replica, 2)
            if replica == BAD or others_fail_too:
                fleet.fail(replica)
    assert fleet.avoided == (frozenset() if others_fail_too else {BAD})


def test_failures_outside_the_window_do_not_count() -> None:
    fleet = Fleet(msgspec.structs.replace(CONFIG, min_requests=4))
    for replica in GOOD:
        fleet.succeed(replica, 4)
    for _ in range(8):
        fleet.fail(BAD)
        fleet.succeed(BAD)
        fleet.now += CONFIG.window_s
    assert fleet.avoided == frozenset()


def test_at_most_the_largest_share_is_out() -> None:
    fleet = Fleet()
    for replica in NAMES:
        fleet.fail(replica, 10)
    assert fleet.avoided == {"r0", "r1"}


def test_the_only_replica_of_a_model_is_never_out() -> None:
    fleet = Fleet()
    fleet.table.set_group(BAD, "a model of its own")
    fleet.fail(BAD, 10)
    assert fleet.avoided == frozenset()


def test_nothing_is_ejected_where_that_is_switched_off() -> None:
    fleet = Fleet(msgspec.structs.replace(CONFIG, enabled=False))
    fleet.fail(BAD, 10)
    assert fleet.avoided == frozenset()


def test_probes_bring_it_back_one_at_a_time() -> None:
    fleet = Fleet()
    fleet.fail(BAD, 3)
    fleet.now += CONFIG.first_out_s
    for _ in range(CONFIG.probes):
        assert fleet.avoided == frozenset()
        probe = fleet.send(BAD)
        assert fleet.avoided == {BAD}
        fleet.table.succeeded(BAD, probe, fleet.now)
    assert fleet.table.standing(BAD) is Standing.IN
    assert [change.standing for change in fleet.changes] == [Standing.EJECTED, Standing.PROBING, Standing.IN]


def test_a_failed_probe_doubles_the_time() -> None:
    fleet = Fleet()
    fleet.fail(BAD, 3)
    for _ in range(8):
        fleet.now += CONFIG.longest_out_s
        assert fleet.avoided == frozenset()
        fleet.fail(BAD)
    backs_off = [change.back_off_s for change in fleet.changes if change.reason]
    assert backs_off == [5, 10, 20, 40, 80, 160, 300, 300, 300]


def test_a_long_good_time_begins_the_times_again() -> None:
    fleet = Fleet()
    for _ in range(2):
        fleet.fail(BAD, 3)
        fleet.now += CONFIG.longest_out_s
        assert fleet.avoided == frozenset()
        fleet.succeed(BAD, CONFIG.probes)
        fleet.now += CONFIG.longest_out_s + 1
    assert [change.back_off_s for change in fleet.changes if change.reason] == [5, 5]


def test_a_probe_whose_client_left_makes_room_for_another() -> None:
    fleet = Fleet()
    fleet.fail(BAD, 3)
    fleet.now += CONFIG.first_out_s
    assert fleet.avoided == frozenset()
    fleet.table.dropped(BAD, fleet.send(BAD), fleet.now)
    assert fleet.avoided == frozenset()
    assert fleet.table.standing(BAD) is Standing.PROBING


def refuse(fleet: Fleet, replica: ReplicaId, retry_after_s: float) -> None:
    fleet.table.refused(replica, fleet.send(replica), retry_after_s, fleet.now)


def test_a_refusal_holds_for_as_long_as_the_replica_says() -> None:
    fleet = Fleet()
    refuse(fleet, BAD, 7.0)
    assert fleet.avoided == {BAD}
    fleet.now += 6.9
    assert fleet.avoided == {BAD}
    fleet.now += 0.1
    assert fleet.avoided == frozenset()
    assert fleet.changes == []


def test_a_refusal_for_days_is_shortened() -> None:
    fleet = Fleet()
    refuse(fleet, BAD, 1e9)
    fleet.now += CONFIG.longest_hold_s
    assert fleet.avoided == frozenset()


def test_where_no_other_replica_is_left_one_request_tries_every_few_seconds() -> None:
    fleet = Fleet()
    refuse(fleet, BAD, 30.0)
    assert fleet.table.held([BAD], fleet.now) == {BAD: LONGEST_LONE_HOLD_S}
    fleet.now += LONGEST_LONE_HOLD_S
    assert fleet.table.held([BAD], fleet.now) == {}
    fleet.send(BAD)
    assert fleet.table.held([BAD], fleet.now) == {BAD: LONGEST_LONE_HOLD_S}
    assert fleet.avoided == {BAD}, "with others left, it is still held"


def test_a_usable_answer_to_a_request_sent_later_ends_the_hold() -> None:
    fleet = Fleet()
    earlier = fleet.send(BAD)
    fleet.now += 1.0
    refuse(fleet, BAD, 30.0)
    fleet.table.succeeded(BAD, earlier, fleet.now)
    assert fleet.avoided == {BAD}, "it was taken before the refusal"
    fleet.now += LONGEST_LONE_HOLD_S
    trial = fleet.send(BAD)
    fleet.table.heard(BAD, trial, fleet.now)
    assert fleet.avoided == frozenset()
    assert fleet.table.held([BAD], fleet.now) == {}


def test_a_shorter_retry_after_counts_where_no_other_replica_is_left() -> None:
    fleet = Fleet()
    refuse(fleet, BAD, 0.5)
    assert fleet.table.held([BAD], fleet.now) == {BAD: 0.5}


def stall(fleet: Fleet, num_waiting: int = 3) -> None:
    for _ in range(num_waiting):
        fleet.send(BAD)
    fleet.now += CONFIG.stall_s
    for replica in GOOD:
        fleet.succeed(replica)


def test_a_replica_that_begins_no_answer_while_others_do_is_ejected() -> None:
    fleet = Fleet()
    stall(fleet)
    assert fleet.check() == [BAD]
    assert fleet.avoided == {BAD}
    assert fleet.changes[0].reason is EjectionReason.STALLED


def test_a_replica_that_still_streams_is_not_stalled() -> None:
    fleet = Fleet()
    stall(fleet)
    assert fleet.check(r0=fleet.now - 1.0) == []


def test_one_request_that_waits_long_is_no_stall() -> None:
    fleet = Fleet()
    stall(fleet, num_waiting=2)
    assert fleet.check() == []


def test_nobody_is_stalled_where_nobody_answers() -> None:
    fleet = Fleet()
    for replica in NAMES:
        for _ in range(5):
            fleet.send(replica)
    fleet.now += 1000.0
    assert fleet.check() == []


def test_a_replica_with_long_whole_answers_that_completes_others_is_not_stalled() -> None:
    fleet = Fleet()
    for _ in range(CONFIG.consecutive_failures):
        fleet.send(BAD, streams=False)
    for _ in range(60):
        whole = fleet.send(BAD, streams=False)
        fleet.now += 1.0
        fleet.table.succeeded(BAD, whole, fleet.now)
        for replica in GOOD:
            fleet.succeed(replica)
        assert fleet.check() == []
    assert fleet.changes == []


def test_whole_answers_alone_are_no_stall() -> None:
    fleet = Fleet()
    for _ in range(CONFIG.consecutive_failures):
        fleet.send(BAD, streams=False)
    stall(fleet, num_waiting=CONFIG.consecutive_failures - 1)
    assert fleet.check() == []


@pytest.mark.parametrize("streams", [False, True])
def test_a_replica_that_has_just_completed_an_answer_is_not_stalled(streams: bool) -> None:
    fleet = Fleet()
    done = fleet.send(BAD, streams=streams)
    stall(fleet)
    fleet.table.succeeded(BAD, done, fleet.now)
    assert fleet.check() == []
    fleet.now += CONFIG.stall_s
    assert fleet.check() == [BAD]


def test_whole_answers_that_hang_are_failures_when_they_time_out() -> None:
    fleet = Fleet()
    for request in [fleet.send(BAD, streams=False) for _ in range(CONFIG.consecutive_failures)]:
        fleet.table.failed(BAD, request, fleet.now + 600.0)
    assert fleet.changes[0].reason is EjectionReason.CONSECUTIVE_FAILURES


def test_where_others_take_long_more_patience_is_had() -> None:
    fleet = Fleet()
    for _ in range(3):
        fleet.send(BAD)
    fleet.succeed(GOOD[0], took_s=8.0)
    fleet.now += 8.0
    assert fleet.check() == []
    fleet.now += 16.0
    assert fleet.check() == [BAD]


def test_a_probe_without_an_answer_is_a_failed_one() -> None:
    fleet = Fleet()
    stall(fleet)
    fleet.check()
    fleet.now += CONFIG.first_out_s
    assert fleet.avoided == frozenset()
    stall(fleet, num_waiting=1)
    assert fleet.check() == [BAD]
    assert fleet.changes[-1] == Change(BAD, Standing.EJECTED, EjectionReason.PROBE_FAILED, 2 * CONFIG.first_out_s)


@pytest.mark.parametrize(("expected_s", "is_slow"), [(1.0, True), (10.0, False)])
def test_a_slow_replica_is_ejected_unless_its_requests_are_long(expected_s: float, is_slow: bool) -> None:
    fleet = Fleet(msgspec.structs.replace(CONFIG, window_s=1000.0))
    for _ in range(CONFIG.min_requests):
        for replica in GOOD:
            fleet.succeed(replica, took_s=0.9)
        fleet.succeed(BAD, took_s=10.0, expected_s=expected_s)
    fleet.check()
    assert fleet.avoided == ({BAD} if is_slow else frozenset())


def test_a_replica_with_long_whole_answers_is_not_slow() -> None:
    fleet = Fleet(msgspec.structs.replace(CONFIG, window_s=1000.0))
    for _ in range(2 * CONFIG.min_requests):
        for replica in GOOD:
            fleet.succeed(replica, took_s=0.1)
        whole = fleet.send(BAD, streams=False)
        fleet.now += 20.0
        fleet.table.succeeded(BAD, whole, fleet.now)
    fleet.check()
    assert fleet.changes == []


def test_what_is_reported_a_replica_that_left_is_ignored() -> None:
    fleet = Fleet()
    requests = [fleet.send(BAD) for _ in range(5)]
    fleet.table.remove(BAD)
    for request in requests:
        fleet.table.heard(BAD, request, fleet.now)
        fleet.table.failed(BAD, request, fleet.now)
    assert fleet.avoided == frozenset()


def test_what_ends_after_its_replica_has_joined_again_says_nothing_of_the_new_life() -> None:
    fleet = Fleet()
    old = [fleet.send(BAD) for _ in range(CONFIG.consecutive_failures)]
    fleet.table.remove(BAD)
    fleet.table.add(BAD)
    for request in old:
        fleet.table.failed(BAD, request, fleet.now)
    assert fleet.changes == []
    assert fleet.table.standing(BAD) is Standing.IN


def test_what_another_gateway_ejects_is_ejected_here_within_the_largest_share_and_probed() -> None:
    fleet = Fleet()
    for replica in NAMES:
        fleet.table.failed_elsewhere(replica, fleet.now)
        fleet.table.failed_elsewhere(replica, fleet.now)
    fleet.table.failed_elsewhere(ReplicaId("unknown"), fleet.now)
    assert fleet.avoided == {"r0", "r1"}
    assert [change.reason for change in fleet.changes] == [EjectionReason.PEER, EjectionReason.PEER]
    fleet.now += CONFIG.first_out_s
    assert fleet.avoided == frozenset(), "a probe may go"
