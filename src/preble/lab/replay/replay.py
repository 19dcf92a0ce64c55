"""Replay of a decision log through a fresh scheduler: the same settings and calls make the same placements."""

from __future__ import annotations

import msgspec

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.registry import reads_token_ids
from preble.core.types import (
    BlocksDemoted,
    BlocksEvicted,
    BlocksShared,
    CacheCleared,
    EventsLost,
    PeerId,
    Placement,
    ReplicaId,
    RequestId,
)
from preble.core.types.events import PeerReported
from preble.core.types.life import Ended, FirstToken, Moved, TransferFailed, Transferred
from preble.decisions.lines import (
    AddReplicaLine,
    ClearedLine,
    DemotedLine,
    Event,
    EventsLostLine,
    EvictedLine,
    PeerForgottenLine,
    PeerHeldLine,
    PeerPlacedLine,
    PlaceLine,
    PlacementRow,
    RemoveReplicaLine,
    ReportLine,
    SharedLine,
    StoredLine,
    TimerLine,
    TransfersLine,
    TrustLine,
    placement_row,
)
from preble.decisions.reader import LogReader, Numbered
from preble.decisions.settings import make_scheduler
from preble.errors import ConfigError, NoReplicaError, PrebleError, PromptTooLong


class Difference(msgspec.Struct, frozen=True):
    """The first decision that differs. `line`: of the log; `request_id`: None if it is not a placement."""

    line: int
    request_id: str | None
    logged: str
    replayed: str


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay.

    `compared`: the placements that were compared with the log, all equal before `difference`. `ended_at`: why the
    replay stopped before the log's end; None if it did not.
    """

    policy: str
    written_by: str
    compared: int
    difference: Difference | None = None
    ended_at: str | None = None


def check_policy(log: LogReader, *, import_policy: bool) -> None:
    """Refuse to run code that a log names, unless `import_policy`: whoever wrote the log chose that code.

    Raises: ConfigError: the log's policy is `module:Class`.
    """
    policy = log.header.settings.policy
    if ":" in policy and not import_policy:
        raise ConfigError(
            f"{log.path} names the policy {policy}, and playing it imports that module and runs it; "
            "if you trust the log and the module, add --import-policy"
        )


class Replay:
    """One replay of one log. `scheduler`: in the state of the logged one after the events so far.

    `placement`: of the last event; None unless it placed a request.
    """

    def __init__(self, log: LogReader, *, import_policy: bool = False) -> None:
        """Raises: ConfigError: no such policy, it uses token ids and the log's are renamed, or see `check_policy`."""
        check_policy(log, import_policy=import_policy)
        policy = log.header.settings.policy
        if reads_token_ids(policy) and log.header.tokens != "plain":
            raise ConfigError(
                f"{log.path} cannot be replayed: {policy} chooses by token ids, and the log's are renamed; "
                'log plain ones (decisions.log_tokens = "plain")'
            )
        self._log = log
        self.scheduler = make_scheduler(log.header.settings, log.header.profile, learned=log.header.learned)
        self.placement: Placement | None = None

    def run(self) -> ReplayResult:
        """Play the log up to the first difference. Deterministic.

        Raises: TraceFormatError: the log is damaged, or no scheduler could have written it.
        """
        compared = 0
        difference = None
        for numbered in self._log:
            difference = self.play(numbered)
            if difference is not None:
                break
            compared += isinstance(numbered.event, PlaceLine)
        return ReplayResult(
            policy=self._log.header.settings.policy,
            written_by=self._log.header.written_by,
            compared=compared,
            difference=difference,
            ended_at=self._log.ended_at,
        )

    def play(self, numbered: Numbered) -> Difference | None:
        """Play the log's next event. Raises: as `run`."""
        number, event = numbered
        self.placement = None
        try:
            if isinstance(event, PlaceLine):
                self.placement, error = place(self.scheduler, event)
                return _difference(number, event, self.placement, error)
            if isinstance(event, StoredLine):
                return _compare_stored(self.scheduler, number, event)
            tell(self.scheduler, event)
        except (PrebleError, ValueError) as error:
            raise self._log.error(number, error) from error
        return None


def _difference(number: int, line: PlaceLine, placement: Placement | None, error: str | None) -> Difference | None:
    row = None if placement is None else placement_row(placement)
    if row is not None and line.placement is not None and not line.placement.ways:
        row = msgspec.structs.replace(row, ways=())  # a log from before candidates had ways, which decide nothing
    if (row, error) == (line.placement, line.error):
        return None
    return Difference(number, line.id, _told(line.placement, line.error), _told(row, error))


def place(scheduler: GlobalScheduler, line: PlaceLine) -> tuple[Placement | None, str | None]:
    """Place a logged request. Return the placement, or the name of the error."""
    try:
        return scheduler.place(line.request(), line.t), None
    except (NoReplicaError, PromptTooLong) as error:
        return None, type(error).__name__


def _compare_stored(scheduler: GlobalScheduler, number: int, line: StoredLine) -> Difference | None:
    located = scheduler.on_stored(line.event(), line.t)
    if located == line.located:
        return None
    known = {True: "blocks were located", False: "blocks could not be located"}
    return Difference(number, None, known[line.located], known[located])


def report(
    scheduler: GlobalScheduler,
    peer: PeerId,
    request_id: RequestId,
    fact: Moved | Transferred | TransferFailed | FirstToken | Ended,
    now: float,
) -> None:
    """Report a logged fact. Raises: UnknownRequest."""
    if isinstance(fact, Moved):
        scheduler.move(request_id, fact.replica_id, now)
    elif peer:
        scheduler.assume(PeerReported(peer, request_id, fact), now)
    elif isinstance(fact, Transferred):
        scheduler.on_transferred(request_id, now)
    elif isinstance(fact, TransferFailed):
        scheduler.on_transfer_failed(request_id, now, kept_s=fact.kept_s)
    elif isinstance(fact, FirstToken):
        scheduler.on_first_token(request_id, now)
    else:
        scheduler.on_finish(request_id, fact.output_tokens or 0, now, cached_tokens=fact.cached_tokens)


def tell(scheduler: GlobalScheduler, event: Event) -> None:
    """Play an event without a result to compare."""
    match event:
        case ReportLine(t=t, id=request_id, fact=fact, peer=peer):
            report(scheduler, PeerId(peer), RequestId(request_id), fact, t)
        case PeerPlacedLine() | PeerHeldLine():
            scheduler.assume(event.event(), event.t)
        case PeerForgottenLine(t=t, peer=peer):
            scheduler.forget_peer(PeerId(peer), t)
        case EvictedLine(t=t, replica=replica, blocks=blocks, tier=tier):
            scheduler.on_evicted(BlocksEvicted(ReplicaId(replica), blocks, tier), t)
        case DemotedLine(t=t, replica=replica, blocks=blocks, tier=tier):
            scheduler.on_evicted(BlocksDemoted(ReplicaId(replica), blocks, tier), t)
        case SharedLine(t=t, replica=replica, blocks=blocks):
            scheduler.on_evicted(BlocksShared(ReplicaId(replica), blocks), t)
        case ClearedLine(t=t, replica=replica, is_past=is_past, engine_only=engine_only):
            scheduler.on_evicted(CacheCleared(ReplicaId(replica), is_past, engine_only), t)
        case EventsLostLine(t=t, replica=replica):
            scheduler.on_evicted(EventsLost(ReplicaId(replica)), t)
        case AddReplicaLine(t=t, replica=spec):
            scheduler.add_replica(spec, t)
        case RemoveReplicaLine(t=t, replica=replica):
            scheduler.remove_replica(ReplicaId(replica), t)
        case TrustLine(t=t, replica=replica, trusted=trusted):
            scheduler.set_trust(ReplicaId(replica), trusted, t)
        case TransfersLine(t=t, replica=replica, allowed=allowed):
            scheduler.allow_transfers(ReplicaId(replica), allowed, t)
        case TimerLine(t=t):
            scheduler.on_timer(t)


def _told(placement: PlacementRow | None, error: str | None) -> str:
    if placement is None:
        return f"no placement ({error})"
    costs = ", ".join(
        f"{c.replica} {c.matched_tokens}/{c.load_s!r}/{c.eviction_s!r}/{c.prefill_s!r}" for c in placement.candidates
    )
    return (
        f"{placement.replica} by {placement.reason}, {placement.matched_tokens} tokens cached"
        f" (candidates' cached/L/M/P: {costs})"
    )
