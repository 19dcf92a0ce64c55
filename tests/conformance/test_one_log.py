"""One decision log, three readers: what the simulator decided, a replay and the gateway's dispatcher decide again.

Whoever drives the scheduler, the same calls at the same times make the same placements, to the last digit of each
candidate's cost. The log is of a small cluster that has everything: shared prefixes, conversations, a burst, evictions,
replicas that are lost, added and restarted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from preble.core.policies.registry import policy_names
from preble.core.types import BlockHash, BlocksEvicted, ReplicaId
from preble.core.types.life import Ended, Lost, Outcome
from preble.decisions.lines import (
    AddReplicaLine,
    Event,
    EvictedLine,
    PlaceLine,
    RemoveReplicaLine,
    ReportLine,
    StoredLine,
    TimerLine,
)
from preble.decisions.names import LogNames
from preble.decisions.reader import LogReader
from preble.decisions.recent import RecentDecisions
from preble.engines.adapter import EngineInfo
from preble.lab.replay.replay import Replay
from preble.lab.sim import Failure, FailureKind, SimConfig, Simulation
from preble.serving.placed import Placed
from preble.serving.placements import Dispatcher, Placements
from preble.serving.replicas.rotation import Rotation
from preble.serving.telemetry.metrics import Telemetry
from preble.serving.terms import Terms
from support.logs import Recording
from support.small_cluster import PROFILE, workload
from support.virtual_time import VirtualTimeLoop

SCRIPT = (
    Failure(1.02, FailureKind.RESTARTED, "r0"),
    Failure(1.03, FailureKind.LOST, "r1"),
    Failure(1.04, FailureKind.RESTARTED, "r2"),
    Failure(1.2, FailureKind.ADDED, "r1"),
)
"""Shortly after the burst, so that some of its requests lose their replica before they have a token."""


def config(policy: str) -> SimConfig:
    return SimConfig(
        profile=PROFILE,
        replicas=3,
        policy=policy + ("?min_requests=2&interval_s=0.25" if policy.startswith("e2") else ""),
        kv_tokens=2000,
        window_s=2.0,
        dispatch_s=0.002,
        failures=SCRIPT,
    )


@pytest.fixture(scope="module", params=policy_names())
def log(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a simulation decided."""
    simulated = config(request.param)
    recording = Recording(simulated.scheduler_settings, profile=PROFILE)
    Simulation(simulated, workload(), scheduler=recording.scheduler).run()
    return recording.written_to(tmp_path_factory.mktemp("log") / f"{request.param}.jsonl")


def test_the_log_has_everything_that_goes_through_the_door(log: Path) -> None:
    events = events_of(log)
    assert {type(event) for event in events} == {
        *(AddReplicaLine, RemoveReplicaLine, PlaceLine, ReportLine),
        *(StoredLine, EvictedLine, TimerLine),
    }
    placed = Counter(event.id for event in events if isinstance(event, PlaceLine))
    assert max(placed.values()) == 2, "a request whose replica was lost was placed again"


def test_a_replay_of_a_simulation_places_alike(log: Path) -> None:
    result = Replay(LogReader(log)).run()
    assert (result.difference, result.ended_at) == (None, None)
    assert result.compared == sum(isinstance(event, PlaceLine) for event in events_of(log))


def test_the_gateways_dispatcher_places_alike(log: Path, tmp_path: Path) -> None:
    """It is given the requests, their answers and the KV events of the log; timers it has to run by itself."""
    header = LogReader(log).header
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        recording = Recording(header.settings, _NamesAsTheyAre(), header.profile)
        runner.run(dispatch(recording, events_of(log)))
    assert events_of(recording.written_to(tmp_path / "dispatched.jsonl")) == events_of(log)


def events_of(log: Path) -> list[Event]:
    return [numbered.event for numbered in LogReader(log)]


class _NamesAsTheyAre(LogNames):
    """Blocks are logged under the names that they have in the log that is played, so that the two can be compared."""

    def block(self, block_hash: BlockHash) -> int:
        assert isinstance(block_hash, int)
        return block_hash


class _Engine:
    """The seam to a replica: all that a dispatcher asks it for."""

    takes_cache_salt = True
    failed_leg = None

    def __init__(self, replica_id: str) -> None:
        self.replica_id = ReplicaId(replica_id)


async def dispatch(recording: Recording, events: Iterable[Event]) -> None:
    """Have a dispatcher carry out what the log says, its clock set to the log's times."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    scheduler = recording.scheduler
    placements = Placements(scheduler, Telemetry(), RecentDecisions(scheduler.policy.name, 10))
    player = _Player(placements)
    for event in events:
        loop.move_to(event.t)
        if isinstance(event, TimerLine):
            # One turn of the loop to find that the timer is due, and one to run it.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        else:
            player.play(event)
    assert not placements.in_flight
    placements.timer.close()


class _Broken:
    """A connection to a replica: it breaks when that goes."""

    heard_at = None

    def __init__(self, placed: Placed) -> None:
        self._placed = placed

    def lost(self, loss: Lost) -> None:
        self._placed.report(Ended(Outcome.ENGINE_GONE, text=str(loss.reason)))


class _Player:
    def __init__(self, placements: Placements) -> None:
        self._dispatcher = Dispatcher(placements)
        self._rotation = Rotation(placements)
        self._placed: dict[str, Placed] = {}

    def play(self, event: Event) -> None:
        match event:
            case PlaceLine():
                self._placed[event.id] = self._dispatcher.place(event.request(), Terms(event.id))
            case ReportLine(id=request_id, fact=Ended() as end):
                self._placed.pop(request_id).report(end)
            case ReportLine(id=request_id, fact=fact):
                self._placed[request_id].report(fact)
            case StoredLine():
                self._rotation.apply([event.event()])
            case EvictedLine():
                self._rotation.apply([BlocksEvicted(ReplicaId(event.replica), event.blocks)])
            case AddReplicaLine():
                self._rotation.add(
                    _Engine(event.replica.replica_id),  # type: ignore[arg-type]
                    EngineInfo("fake", ("",), event.replica),
                )
            case RemoveReplicaLine():
                self._lose(ReplicaId(event.replica))
            case _:
                pytest.fail(f"a simulation does not log {type(event).__name__}")

    def _lose(self, replica_id: ReplicaId) -> None:
        """The replica goes, and with it the connections of its requests; their carrier ends the placements."""
        for request_id, placed in list(self._placed.items()):
            if placed.placement.replica_id == replica_id:
                del self._placed[request_id]
                placed.carried_by(_Broken(placed))
        self._rotation.remove(replica_id, "lost")
