"""The decision log's lines: JSON, one object per line, distinguished by `kind`; see docs/reference/decision-log.md.

`line_of` makes the line for one call that changes a scheduler, from its event.
"""

from __future__ import annotations

from math import inf
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from preble import __version__
from preble.core.costs.model import CostProfile
from preble.core.types import (
    NOTHING_LEARNED,
    BlocksDemoted,
    BlocksShared,
    BlocksStored,
    CacheChange,
    CacheCleared,
    Candidate,
    EventsLost,
    Learned,
    PeerId,
    Placement,
    Reason,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Tier,
    Transfer,
    Ways,
)
from preble.core.types.events import (
    NotPlaced,
    PeerForgotten,
    PeerHeld,
    PeerPlaced,
    PeerReported,
    ReplicaAdded,
    ReplicaRemoved,
    Reported,
    RequestPlaced,
    SchedulerEvent,
    Stored,
    TimerEvent,
    TransfersAllowed,
    TrustChanged,
)
from preble.core.types.life import Ended, FirstToken, Moved, TransferFailed, Transferred
from preble.decisions.names import LogNames, unpack_text
from preble.decisions.settings import SchedulerSettings

VERSION = 2
Count = Annotated[int, Meta(ge=0)]


class _LogLine(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="kind", kw_only=True
):
    """What all lines have in common."""


class Header(_LogLine, frozen=True, tag="log"):
    """The first line. `tokens`: whether token ids are the model's own. `unix_time_s`: the Unix time at `t`.

    `gateway`: which gateway of a group decided; "" for one that has no peers. `learned`: what the scheduler began with.
    """

    version: int
    written_by: str
    tokens: Literal["plain", "renamed"]
    t: float
    unix_time_s: float
    settings: SchedulerSettings
    profile: CostProfile
    gateway: str = ""
    learned: Learned = NOTHING_LEARNED


class _Event(_LogLine, frozen=True):
    """A call that changed the scheduler at time `t`, in seconds of the scheduler's clock."""

    t: float


class CandidateRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One candidate: [replica, matched tokens, L, M, P, those of the tokens to be loaded], costs in seconds."""

    replica: str
    matched_tokens: int
    load_s: float
    eviction_s: float
    prefill_s: float
    loaded_tokens: int = 0


class PlacementRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The scheduler's decision. `copied_tokens`: those of each candidate's matched tokens that it would have copied
    from another replica; () for none anywhere. `ways`: see `Candidate`; () for none."""

    replica: str
    reason: Reason
    matched_tokens: int
    candidates: tuple[CandidateRow, ...]
    transfer: Transfer | None = None
    copied_tokens: tuple[int, ...] = ()
    ways: tuple[Ways, ...] = ()


class PlaceLine(_Event, frozen=True, tag="place"):
    """A request to be placed, and either its placement or the name of the error. `prompt`: see `LogNames.tokens`."""

    id: str
    prompt: str
    num_prompt_tokens: Count
    namespace: str = ""
    avoid: tuple[str, ...] = ()
    max_output_tokens: int | None = None
    model: str = ""
    keeps_kv: bool = True
    first_token_by: float | None = None
    tpot_s: float | None = None
    splits: bool = True
    placement: PlacementRow | None = None
    error: str | None = None

    def request(self) -> Request:
        """Raises: ValueError: the prompt is unreadable."""
        prompt = unpack_text(self.prompt)
        request = Request(
            RequestId(self.id),
            prompt,
            self.max_output_tokens,
            self.namespace,
            frozenset(map(ReplicaId, self.avoid)),
            self.model,
            self.keeps_kv,
            inf if self.first_token_by is None else self.first_token_by,
            inf if self.tpot_s is None else self.tpot_s,
            self.splits,
        )
        if request.num_prompt_tokens != self.num_prompt_tokens:
            raise ValueError(f"the prompt has {request.num_prompt_tokens} tokens, not {self.num_prompt_tokens}")
        return request


class ReportLine(_Event, frozen=True, tag="report"):
    """What has happened to a placed request. `peer`: the gateway that placed it, "" for this one."""

    id: str
    fact: Moved | Transferred | TransferFailed | FirstToken | Ended
    peer: str = ""


class PeerPlacedLine(_Event, frozen=True, tag="peer_placed"):
    """Gateway `peer` has placed a request. `prompt`: None where only its length is known here."""

    peer: str
    id: str
    replica: str
    num_prompt_tokens: int
    matched_tokens: int | None = None
    prompt: str | None = None
    namespace: str = ""
    source: str | None = None

    def event(self) -> PeerReported:
        """Raises: ValueError: the prompt is unreadable."""
        fact = PeerPlaced(
            ReplicaId(self.replica),
            self.num_prompt_tokens,
            self.matched_tokens,
            None if self.prompt is None else unpack_text(self.prompt),
            self.namespace,
            None if self.source is None else ReplicaId(self.source),
        )
        return PeerReported(PeerId(self.peer), RequestId(self.id), fact)


class PeerHeldLine(_Event, frozen=True, tag="peer_held"):
    """Gateway `peer` had a replica compute a prompt before it was heard."""

    peer: str
    replica: str
    prompt: str
    namespace: str = ""

    def event(self) -> PeerHeld:
        """Raises: ValueError: the prompt is unreadable."""
        return PeerHeld(PeerId(self.peer), ReplicaId(self.replica), unpack_text(self.prompt), self.namespace)


class PeerForgottenLine(_Event, frozen=True, tag="peer_forgotten"):
    """Gateway `peer` is gone: nothing that it placed counts any more."""

    peer: str


class StoredLine(_Event, frozen=True, tag="stored"):
    """`located`: whether the scheduler knew what is before these blocks."""

    replica: str
    blocks: tuple[int, ...]
    tokens: str
    block_size: Annotated[int, Meta(ge=1)]
    parent: int | None = None
    namespace: str = ""
    located: bool = True

    def event(self) -> BlocksStored:
        """Raises: ValueError: the tokens are unreadable."""
        tokens = unpack_text(self.tokens)
        return BlocksStored(ReplicaId(self.replica), self.blocks, self.parent, tokens, self.block_size, self.namespace)


class EvictedLine(_Event, frozen=True, tag="evicted"):
    replica: str
    blocks: tuple[int, ...]
    tier: Tier | None = None


class DemotedLine(_Event, frozen=True, tag="demoted"):
    """Blocks have left the engine's memory; a copy is left in `tier`."""

    replica: str
    blocks: tuple[int, ...]
    tier: Tier


class SharedLine(_Event, frozen=True, tag="shared"):
    """Blocks were copied into the store of the replica."""

    replica: str
    blocks: tuple[int, ...]


class ClearedLine(_Event, frozen=True, tag="cleared"):
    replica: str
    is_past: bool = False
    engine_only: bool = False


class EventsLostLine(_Event, frozen=True, tag="events_lost"):
    """A replica's KV events do not arrive any more; its cache is estimated until it is `cleared`."""

    replica: str


class AddReplicaLine(_Event, frozen=True, tag="add_replica"):
    replica: ReplicaSpec


class RemoveReplicaLine(_Event, frozen=True, tag="remove_replica"):
    replica: str


class TrustLine(_Event, frozen=True, tag="trust"):
    """Whether the replica's cache counts from now on."""

    replica: str
    trusted: bool


class TransfersLine(_Event, frozen=True, tag="transfers"):
    """Whether the replica takes part in new transfers from now on."""

    replica: str
    allowed: bool


class TimerLine(_Event, frozen=True, tag="timer"):
    pass


class DroppedLine(_LogLine, frozen=True, tag="dropped"):
    """`count` lines are missing here: the writer was too slow, or the disk was full."""

    count: Count


class FullLine(_LogLine, frozen=True, tag="full"):
    """The log has reached its size limit; this is the last line."""


Event = (
    PlaceLine
    | ReportLine
    | PeerPlacedLine
    | PeerHeldLine
    | PeerForgottenLine
    | StoredLine
    | EvictedLine
    | DemotedLine
    | SharedLine
    | ClearedLine
    | EventsLostLine
    | AddReplicaLine
    | RemoveReplicaLine
    | TrustLine
    | TransfersLine
    | TimerLine
)
Line = Header | Event | DroppedLine | FullLine


def header_line(
    names: LogNames,
    now: float,
    unix_time_s: float,
    settings: SchedulerSettings,
    profile: CostProfile,
    gateway: str = "",
    learned: Learned = NOTHING_LEARNED,
) -> Header:
    return Header(
        version=VERSION,
        written_by=f"preble {__version__}",
        tokens="renamed" if names.renames_tokens else "plain",
        t=now,
        unix_time_s=unix_time_s,
        settings=settings,
        profile=profile,
        gateway=gateway,
        learned=learned,
    )


def line_of(names: LogNames, now: float, event: SchedulerEvent) -> Event:
    match event:
        case RequestPlaced(request, placement):
            return _place_line(names, now, request, placement_row(placement), None)
        case NotPlaced(request, error):
            return _place_line(names, now, request, None, type(error).__name__)
        case Reported(request_id, fact):
            return ReportLine(t=now, id=request_id, fact=fact)
        case PeerReported(peer, request_id, PeerPlaced() as placed):
            return _peer_placed_line(names, now, peer, request_id, placed)
        case PeerReported(peer, request_id, fact):
            return ReportLine(t=now, id=request_id, fact=fact, peer=peer)  # type: ignore[arg-type]
        case PeerHeld(peer, replica, prompt, namespace):
            hidden = names.tokens(prompt), names.namespace(namespace)
            return PeerHeldLine(t=now, peer=peer, replica=replica, prompt=hidden[0], namespace=hidden[1])
        case PeerForgotten(peer):
            return PeerForgottenLine(t=now, peer=peer)
        case Stored(stored, located):
            return _stored_line(names, now, stored, located)
        case ReplicaAdded(spec):
            return AddReplicaLine(t=now, replica=spec)
        case ReplicaRemoved(replica):
            return RemoveReplicaLine(t=now, replica=replica)
        case TrustChanged(replica, trusted):
            return TrustLine(t=now, replica=replica, trusted=trusted)
        case TransfersAllowed(replica, allowed):
            return TransfersLine(t=now, replica=replica, allowed=allowed)
        case TimerEvent():
            return TimerLine(t=now)
    return _evicted_line(names, now, event)


def candidate_row(candidate: Candidate) -> CandidateRow:
    return CandidateRow(
        candidate.replica_id,
        int(candidate.matched_tokens),
        float(candidate.load_s),
        float(candidate.eviction_s),
        float(candidate.prefill_s),
        candidate.loaded_tokens,
    )


def placement_row(placement: Placement) -> PlacementRow:
    weighed = placement.candidates
    copied = tuple(candidate.copied_tokens for candidate in weighed) if placement.transfer is not None else ()
    return PlacementRow(
        placement.replica_id,
        placement.reason,
        int(placement.matched_tokens),
        tuple(map(candidate_row, weighed)),
        placement.transfer,
        copied if any(copied) else (),
        tuple(candidate.ways for candidate in weighed if candidate.ways is not None),
    )


def _place_line(
    names: LogNames, now: float, request: Request, placement: PlacementRow | None, error: str | None
) -> PlaceLine:
    return PlaceLine(
        t=now,
        id=request.request_id,
        prompt=names.tokens(request.prompt),
        num_prompt_tokens=request.num_prompt_tokens,
        namespace=names.namespace(request.namespace),
        avoid=tuple(sorted(request.avoid)),
        max_output_tokens=request.max_output_tokens,
        model=request.model,
        keeps_kv=request.keeps_kv,
        first_token_by=request.first_token_by if request.first_token_by < inf else None,
        tpot_s=request.tpot_s if request.tpot_s < inf else None,
        splits=request.splits,
        placement=placement,
        error=error,
    )


def _peer_placed_line(
    names: LogNames, now: float, peer: PeerId, request_id: RequestId, placed: PeerPlaced
) -> PeerPlacedLine:
    return PeerPlacedLine(
        t=now,
        peer=peer,
        id=request_id,
        replica=placed.replica_id,
        num_prompt_tokens=placed.num_prompt_tokens,
        matched_tokens=placed.matched_tokens,
        prompt=None if placed.prompt is None else names.tokens(placed.prompt),
        namespace=names.namespace(placed.namespace),
        source=placed.source,
    )


def _stored_line(names: LogNames, now: float, event: BlocksStored, located: bool) -> StoredLine:
    return StoredLine(
        t=now,
        replica=event.replica_id,
        blocks=tuple(map(names.block, event.block_hashes)),
        tokens=names.tokens(event.tokens),
        block_size=event.block_size,
        parent=None if event.parent is None else names.block(event.parent),
        namespace=names.namespace(event.namespace),
        located=located,
    )


def _evicted_line(
    names: LogNames, now: float, event: CacheChange
) -> EvictedLine | DemotedLine | SharedLine | ClearedLine | EventsLostLine:
    if isinstance(event, EventsLost):
        return EventsLostLine(t=now, replica=event.replica_id)
    if isinstance(event, CacheCleared):
        return ClearedLine(t=now, replica=event.replica_id, is_past=event.is_past, engine_only=event.engine_only)
    blocks = tuple(map(names.block, event.block_hashes))
    if isinstance(event, BlocksDemoted):
        return DemotedLine(t=now, replica=event.replica_id, blocks=blocks, tier=event.tier)
    if isinstance(event, BlocksShared):
        return SharedLine(t=now, replica=event.replica_id, blocks=blocks)
    return EvictedLine(t=now, replica=event.replica_id, blocks=blocks, tier=event.tier)
