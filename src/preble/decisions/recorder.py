"""A decision log as a listener of a scheduler."""

from __future__ import annotations

from preble.core.types import (
    BlocksStored,
    CacheChange,
    PeerEvent,
    PeerHeld,
    PeerId,
    PeerPlaced,
    Placement,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
)
from preble.decisions import lines
from preble.decisions.writer import LogWriter
from preble.errors import NoReplicaError, PromptTooLong


class DecisionRecorder:
    """Writes every call that changes a scheduler into the log, in order. See `SchedulerListener`.

    Give it to the scheduler's `listen` before the first call; otherwise the log cannot be replayed.
    """

    def __init__(self, log: LogWriter) -> None:
        self._log = log

    def placed(self, request: Request, placement: Placement, now: float) -> None:
        self._log.write(lines.place_line, now, request, placement, None, size=len(request.prompt))

    def not_placed(self, request: Request, error: NoReplicaError | PromptTooLong, now: float) -> None:
        self._log.write(lines.place_line, now, request, None, type(error).__name__, size=len(request.prompt))

    def moved(self, request_id: RequestId, to: ReplicaId, now: float) -> None:
        self._log.write(lines.as_it_is, lines.MoveLine(t=now, id=request_id, to=to))

    def first_token(self, request_id: RequestId, now: float) -> None:
        self._log.write(lines.as_it_is, lines.FirstTokenLine(t=now, id=request_id))

    def finished(self, request_id: RequestId, output_tokens: int, cached_tokens: int | None, now: float) -> None:
        line = lines.FinishLine(t=now, id=request_id, output_tokens=output_tokens, cached_tokens=cached_tokens)
        self._log.write(lines.as_it_is, line)

    def assumed(self, event: PeerEvent, now: float) -> None:
        size = len(event.prompt or b"") if isinstance(event, PeerPlaced | PeerHeld) else 0
        self._log.write(lines.assumed_line, now, event, size=size)

    def peer_forgotten(self, peer: PeerId, now: float) -> None:
        self._log.write(lines.as_it_is, lines.PeerForgottenLine(t=now, peer=peer))

    def stored(self, event: BlocksStored, located: bool, now: float) -> None:
        self._log.write(lines.stored_line, now, event, located, size=len(event.tokens))

    def evicted(self, event: CacheChange, now: float) -> None:
        self._log.write(lines.evicted_line, now, event)

    def replica_added(self, spec: ReplicaSpec, now: float) -> None:
        self._log.write(lines.as_it_is, lines.AddReplicaLine(t=now, replica=spec))

    def replica_removed(self, replica_id: ReplicaId, now: float) -> None:
        self._log.write(lines.as_it_is, lines.RemoveReplicaLine(t=now, replica=replica_id))

    def trust_changed(self, replica_id: ReplicaId, trusted: bool, now: float) -> None:
        self._log.write(lines.as_it_is, lines.TrustLine(t=now, replica=replica_id, trusted=trusted))

    def timer_ran(self, now: float) -> None:
        self._log.write(lines.as_it_is, lines.TimerLine(t=now))
