"""Requests that wait with a target: who goes first, who is refused, what becomes of a target that cannot be kept."""

from __future__ import annotations

import pytest

from preble.core.admission.fair_queue import FairQueue, QueueSettings, Waiting
from preble.core.types import RequestId


class Line:
    """The requests of one tenant, each of one second of GPU time; the fleet does one second's work a second."""

    def __init__(self) -> None:
        self.queue = FairQueue(QueueSettings(max_wait_s=60.0))
        self.queue.num_replicas = 1
        self.now = 0.0
        self.offer("early")  # while one waits, the fleet's pace is measured
        for second in (1.0, 2.0):
            self.now = second
            self.offer(f"then{second:.0f}")
            self.go()
        self.go()

    def offer(self, name: str, start_in_s: float | None = None, *, rank: int = 0, tenant: str = "t") -> float:
        """Return when it is told to come again, 0 if it is taken."""
        start_by = None if start_in_s is None else self.now + start_in_s
        entry = Waiting(RequestId(name), tenant, 1.0, self.now, self.now + 60.0, rank, start_by=start_by)
        refused = self.queue.offer(entry, self.now)
        return refused[0].retry_after_s if refused else 0.0

    def go(self) -> str | None:
        """Start the request whose turn it is."""
        entry = self.queue.next(lambda waiting, is_owed: True)
        if entry is None:
            return None
        self.queue.start(entry.tenant, 1.0, self.now)
        self.queue.end(entry.tenant)
        return entry.request_id

    def all(self) -> list[str | None]:
        return [self.go() for _ in range(self.queue.num_waiting)]


def test_who_must_start_first_goes_first() -> None:
    line = Line()
    assert line.offer("patient", 50.0) == 0.0
    assert line.offer("none") == 0.0
    assert line.offer("urgent", 5.0) == 0.0
    assert line.all() == ["urgent", "patient", "none"]


def test_without_targets_they_go_as_they_came() -> None:
    line = Line()
    for name in "abc":
        line.offer(name)
    assert line.all() == ["a", "b", "c"]


def test_no_target_passes_a_better_class() -> None:
    line = Line()
    line.offer("batch", 1.0, rank=1)
    line.offer("person")
    assert line.all() == ["person", "batch"]


def test_a_target_that_cannot_be_kept_is_refused_at_once_with_the_time_that_lacks() -> None:
    line, taken = Line(), 0
    while (late_s := line.offer(str(taken), 3.0)) == 0.0:
        taken += 1
    assert 2 <= taken <= 8, "those that the fleet does in three seconds"
    assert line.offer("in that time", 3.0 + late_s + 0.01) == 0.0


def test_a_target_is_refused_that_would_break_the_promise_to_another() -> None:
    line = Line()
    assert line.offer("promised", 1.5) == 0.0
    assert line.offer("first", 1.0) == 0.0
    assert line.offer("second", 1.0) > 0, "it could start in time, but then `promised` could not"
    assert line.all() == ["first", "promised"]


def test_what_was_promised_too_much_waits_on_and_lets_those_go_whose_time_can_be_kept() -> None:
    line = Line()
    assert line.offer("overdue", 1.0) == 0.0
    line.now += 2.0
    assert line.queue.expire(line.now) == [], "what is taken is not refused later"
    assert line.offer("new", 4.0) == 0.0
    assert line.all() == ["new", "overdue"]


def test_the_longest_wait_ends_every_request() -> None:
    line = Line()
    assert line.offer("overdue", 1.0) == 0.0
    line.now += 60.0
    assert [refused.request_id for refused in line.queue.expire(line.now)] == ["overdue"]
    assert line.queue.num_waiting == 0


def test_each_tenant_has_its_own_turn_whatever_the_others_were_promised() -> None:
    line = Line()
    for number in range(4):
        line.offer(f"t{number}", 10.0)
    line.offer("other", tenant="u")
    assert "other" in line.all()[:2], "they have used as much, so each has every second turn"


@pytest.mark.parametrize("at", range(4))
def test_a_request_with_a_target_can_be_withdrawn(at: int) -> None:
    line = Line()
    entries = [
        Waiting(RequestId(str(i)), "t", 1.0, line.now, line.now + 60.0, start_by=line.now + 9.0 - i) for i in range(4)
    ]
    for entry in entries:
        assert line.queue.offer(entry, line.now) == []
    line.queue.withdraw(entries[at])
    assert line.all() == [str(i) for i in (3, 2, 1, 0) if i != at]
