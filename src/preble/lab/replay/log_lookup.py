"""The decisions about one request, from a replay of a decision log, which lacks some of the candidates."""

from __future__ import annotations

from pathlib import Path

from preble.decisions.lines import Event, FinishLine, FirstTokenLine, RemoveReplicaLine
from preble.decisions.reader import LogReader
from preble.decisions.recent import Decision, DecisionRecord, RecentDecisions
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
    running: dict[str, DecisionRecord] = {}
    for numbered in log:
        if replay.play(numbered) is not None:
            raise ConfigError(f"{path} does not replay from line {numbered.number} on; run `preble replay {path}`")
        placement = replay.placement
        if placement is None:
            _follow(running, numbered.event)
        elif request_id.partition("#")[0] == placement.request_id.partition("#")[0]:
            running[placement.request_id] = recent.placed(placement, numbered.event.t)
    return recent.of_request(request_id)


def _follow(running: dict[str, DecisionRecord], event: Event) -> None:
    """Update placements whose requests have not ended."""
    match event:
        case FirstTokenLine(t=t, id=request_id) if request_id in running:
            running[request_id].first_token_at = t
        case FinishLine(t=t, id=request_id, output_tokens=tokens, cached_tokens=cached) if request_id in running:
            running.pop(request_id).finished(t, "ok" if tokens else "without output", tokens, cached)
        case RemoveReplicaLine(replica=replica):
            for record in running.values():
                record.replica_lost |= record.placement.replica_id == replica
