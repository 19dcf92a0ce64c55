"""The decisions about one request, from a replay of a decision log, which lacks some of the candidates."""

from __future__ import annotations

from pathlib import Path

import msgspec

from preble.core.types.life import Ended, Lost, Outcome, Started
from preble.decisions.lines import Event, RemoveReplicaLine, ReportLine
from preble.decisions.reader import LogReader
from preble.decisions.recent import Decision, PlacedAt, RecentDecisions
from preble.errors import ConfigError
from preble.lab.replay.replay import Replay

MAX_PLACEMENTS = 10_000
"""The most decisions about one request; of more, the first are forgotten."""


def decisions_about(path: Path, request_id: str, *, import_policy: bool = False) -> list[Decision]:
    """Return the placements of this request in order; for ID#N only those of prompt N. O(log).

    Times are Unix times by the log's clock. The log does not say how a request ended; one with output ended well.

    Raises: TraceFormatError: the log is damaged. ConfigError: it cannot be replayed.
    """
    log = LogReader(path)
    replay = Replay(log, import_policy=import_policy)
    header = log.header
    recent = RecentDecisions(header.settings.policy, MAX_PLACEMENTS, unix_offset_s=header.unix_time_s - header.t)
    running: dict[str, PlacedAt] = {}
    for numbered in log:
        if replay.play(numbered) is not None:
            raise ConfigError(f"{path} does not replay from line {numbered.number} on; run `preble replay {path}`")
        placement = replay.placement
        if placement is None:
            _follow(recent, running, numbered.event)
        elif request_id.partition("#")[0] == placement.request_id.partition("#")[0]:
            running[placement.request_id] = placed = PlacedAt(placement, numbered.event.t)
            recent.on(placed, Started(), numbered.event.t)
    return recent.of_request(request_id)


def _follow(recent: RecentDecisions, running: dict[str, PlacedAt], event: Event) -> None:
    """Note what happens to requests that have not ended."""
    match event:
        case ReportLine(id=request_id, fact=Ended() as fact) if not event.peer and request_id in running:
            outcome = Outcome.OK if fact.output_tokens else Outcome.WITHOUT_OUTPUT
            recent.on(running.pop(request_id), msgspec.structs.replace(fact, outcome=outcome), event.t)
        case ReportLine(id=request_id, fact=fact) if not event.peer and request_id in running:
            recent.on(running[request_id], fact, event.t)
        case RemoveReplicaLine(replica=replica):
            for placed in running.values():
                if placed.placement.replica_id == replica:
                    recent.on(placed, Lost(), event.t)
