"""Whatever carriers report, in whatever order, and whenever they die: each placement ends exactly once."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preble.core.costs.model import CostModel, CostProfile
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.registry import make_policy
from preble.core.types import ReplicaId, ReplicaSpec, Request
from preble.core.types.life import Alive, Ended, Fact, FirstToken, Outcome, Progress
from preble.decisions.recent import RecentDecisions
from preble.engines.adapter import EngineInfo
from preble.reservations import Reservation, ReservationTable, UnknownReservation
from preble.reservations.leases import Leases
from preble.serving.placed import LocalPlaced, Placed
from preble.serving.placements import Dispatcher, Placements
from preble.serving.replicas.rotation import Rotation
from preble.serving.telemetry.metrics import Telemetry
from preble.serving.terms import Terms
from support.virtual_time import VirtualTimeLoop

PROFILE = CostProfile("test", "made up", ((0, 0.0), (1000, 0.1)), 0.0, 0.02, 0.0, 0.0, 100_000)
NAMES = st.sampled_from([str(number) for number in range(6)])
SECONDS = st.floats(0.0, 12.0)
REPORTS = {
    "begin": FirstToken(),
    "progress": Progress(3),
    "renew": Alive(),
    "end": Ended(output_tokens=5),
    "fail": Ended(Outcome.ENGINE_GONE),
    "cancel": Ended(Outcome.ABORTED),
}
STEPS = st.one_of(
    st.tuples(st.just("reserve"), NAMES, st.floats(0.1, 20.0)),
    st.tuples(st.sampled_from(list(REPORTS)), NAMES, SECONDS),
    st.tuples(st.just("wait"), NAMES, SECONDS),
    st.tuples(st.just("lose"), st.sampled_from(["a", "b"]), SECONDS),
)


@given(st.lists(st.tuples(st.sampled_from(["hold", "release", "expire"]), NAMES, SECONDS), max_size=60))
def test_leases_expire_when_the_last_renewal_says(steps: list[tuple[str, str, float]]) -> None:
    leases, expected, now = Leases(), dict[str, float](), 0.0
    for what, name, seconds in steps:
        if what == "hold":
            leases.hold(name, now + seconds)
            expected[name] = now + seconds
        elif what == "release" and name in expected:
            leases.release(name)
            del expected[name]
        elif what == "expire":
            now += seconds
            due = {one for one, deadline in expected.items() if deadline <= now}
            assert sorted(leases.expire(now)) == sorted(due)
            expected = {one: deadline for one, deadline in expected.items() if one not in due}
        assert (len(leases), leases.next_at()) == (len(expected), min(expected.values(), default=None))


def test_leases_that_have_ended_or_were_shortened_take_no_memory() -> None:
    leases = Leases()
    for number in range(1000):
        leases.hold("held", 5000.0 - number)
        leases.hold("held", 9000.0)
        leases.hold(f"short-lived {number}", 3600.0)
        leases.release(f"short-lived {number}")
    assert len(leases._due) < 100
    assert (len(leases), leases.next_at(), leases.expire(9000.0)) == (1, 9000.0, ["held"])


def test_an_end_that_fails_gives_back_what_it_took_and_lets_the_others_end() -> None:
    over, ends = list[Reservation](), list[Mock]()
    table = ReservationTable(lambda reservation, end: over.append(reservation))
    for name in ("cancelled", "first", "second"):
        placed = [Mock(spec=Placed, report=Mock(side_effect=OSError(name))) for _ in range(2)]
        ends += [one.report for one in placed]
        table.add(Reservation(name, Mock(), placed, 1.0), 0.0)
    with pytest.raises(OSError, match="cancelled"):
        table.cancel("cancelled")
    with pytest.raises(OSError, match=r"first|second"):
        table.expire(2.0)
    assert {one.reservation_id for one in over} == {"cancelled", "first", "second"} and not table
    assert all(end.call_count == 1 for end in ends)
    table.check()


@given(st.lists(STEPS, max_size=60))
def test_each_placement_ends_exactly_once(steps: list[tuple[str, str, float]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(carried_out(steps))


async def carried_out(steps: list[tuple[str, str, float]]) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    cluster = Cluster()
    for what, name, seconds in steps:
        match what:
            case "wait":
                loop.move_to(loop.time() + seconds)
                cluster.table.expire(loop.time())
            case "lose":
                cluster.lose(name)
            case "reserve":
                cluster.reserve(name, seconds)
            case _:
                cluster.report(what, name)
        cluster.check()
    loop.move_to(loop.time() + 20.0)
    cluster.table.expire(loop.time())
    cluster.check()
    assert len(cluster.table) == 0 and cluster.placements.scheduler.snapshot().num_in_flight == 0
    assert cluster.table.next_at() is None
    cluster.placements.timer.close()


class Cluster:
    """Two replicas before the real dispatcher, and what has been placed and has ended."""

    def __init__(self) -> None:
        scheduler = GlobalScheduler(make_policy("preble"), CostModel(PROFILE))
        self.placements = Placements(scheduler, Telemetry(), RecentDecisions("preble", 10))
        self.placements.listen(self, Ended)
        self.num_ended = 0
        self.dispatcher = Dispatcher(self.placements)
        self.rotation = Rotation(self.placements)
        for name in "ab":
            spec = ReplicaSpec(ReplicaId(name))
            self.rotation.add(Mock(replica_id=spec.replica_id), EngineInfo("fake", ("",), spec))
        self.over: list[Reservation] = []
        self.table = ReservationTable(lambda reservation, end: self.over.append(reservation))
        self.num_placed = 0

    def on(self, placed: LocalPlaced, fact: Fact, now: float) -> None:
        self.num_ended += isinstance(fact, Ended)

    def reserve(self, name: str, lease_s: float) -> None:
        if name in self.table or not self.placements.replicas:
            return
        self.num_placed += 1
        request = Request.of(f"{name}#{self.num_placed}", range(40))
        placed = self.dispatcher.place(request, Terms(request.request_id))
        self.table.add(Reservation(name, Mock(), [placed], lease_s), asyncio.get_running_loop().time())

    def report(self, what: str, name: str) -> None:
        now, was_held = asyncio.get_running_loop().time(), name in self.table
        try:
            self.table.report(name, REPORTS[what], now)
            assert was_held
        except UnknownReservation:
            assert not was_held

    def lose(self, name: str) -> None:
        if ReplicaId(name) in self.placements.replicas:
            self.rotation.remove(ReplicaId(name), "lost")

    def check(self) -> None:
        self.table.check()
        self.placements.scheduler.check()
        assert len(self.over) == self.num_ended == self.num_placed - len(self.table)
        lost = sum(one.loss is not None for one in self.table.values())
        assert len(self.placements.in_flight) == len(self.table) - lost
