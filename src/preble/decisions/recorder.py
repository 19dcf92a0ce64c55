"""A decision log as a listener of a scheduler."""

from __future__ import annotations

from preble.core.types.events import (
    NotPlaced,
    PeerHeld,
    PeerPlaced,
    PeerReported,
    RequestPlaced,
    SchedulerEvent,
    Stored,
)
from preble.decisions.writer import LogWriter


class DecisionRecorder:
    """Writes every call that changes a scheduler into the log, in order. See `SchedulerListener`.

    Give it to the scheduler's `listen` before the first call; otherwise the log cannot be replayed.
    """

    def __init__(self, log: LogWriter) -> None:
        self._log = log

    def on(self, event: SchedulerEvent, now: float) -> None:
        self._log.write(event, now, size=_num_token_bytes(event))


def _num_token_bytes(event: SchedulerEvent) -> int:
    match event:
        case RequestPlaced(request) | NotPlaced(request):
            return len(request.prompt)
        case Stored(stored):
            return len(stored.tokens)
        case PeerReported(fact=PeerPlaced(prompt=bytes(prompt))) | PeerHeld(prompt=prompt):
            return len(prompt)
    return 0
