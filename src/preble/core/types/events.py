"""What changes a scheduler: one value for each call, which its listeners hear when the call is done, in order.

A call that raises because of the caller's mistake changes nothing and is not reported. The same calls on a fresh
scheduler of the same settings make the same placements, so what a listener notes can be replayed. Never compiled, like
`life`.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from preble.core.types import BlocksStored, CacheChange, PackedTokens, PeerId, Placement, Request, RequestId
from preble.core.types.life import Ended, FirstToken, Moved, TransferFailed, Transferred
from preble.core.types.plain import ReplicaId, ReplicaSpec
from preble.errors import NoReplicaError, PromptTooLong


class RequestPlaced(Struct, frozen=True):
    """`GlobalScheduler.place` has chosen."""

    request: Request
    placement: Placement


class NotPlaced(Struct, frozen=True):
    """No replica could take the request. `place` raises `error` afterwards."""

    request: Request
    error: NoReplicaError | PromptTooLong


class Reported(Struct, frozen=True):
    """A fact about one of our requests: `move`, `on_transferred`, `on_transfer_failed`, `on_first_token`,
    `on_finish`."""

    request_id: RequestId
    fact: Moved | Transferred | TransferFailed | FirstToken | Ended


class PeerPlaced(Struct, frozen=True):
    """Another gateway has placed a request on a replica.

    `matched_tokens`: leading prompt tokens that the gateway expects to be cached there, or on `source`; None where it
    does not say.
    `prompt`: None where only the length is known; then the request counts as load, and for no prefix. `namespace`: see
    `Request`. `source`: the replica that computes the prompt for it; None where it does so itself.
    """

    replica_id: ReplicaId
    num_prompt_tokens: int
    matched_tokens: int | None = None
    prompt: PackedTokens | None = None
    namespace: str = ""
    source: ReplicaId | None = None


class PeerReported(Struct, frozen=True):
    """`GlobalScheduler.assume`: a fact about a request of another gateway, which gives no two requests one id.

    Listeners also hear of one that changed nothing yet: an end may come before its placement.
    """

    peer: PeerId
    request_id: RequestId
    fact: PeerPlaced | Transferred | TransferFailed | FirstToken | Ended


class PeerHeld(Struct, frozen=True):
    """`GlobalScheduler.assume`: a replica without KV events has computed a prompt for another gateway lately, before we
    could hear of it."""

    peer: PeerId
    replica_id: ReplicaId
    prompt: PackedTokens
    namespace: str = ""


class PeerForgotten(Struct, frozen=True):
    """Another gateway is gone: nothing that it placed counts any more."""

    peer: PeerId


class Stored(Struct, frozen=True):
    """`located`: what `GlobalScheduler.on_stored` returned."""

    event: BlocksStored
    located: bool


class ReplicaAdded(Struct, frozen=True):
    spec: ReplicaSpec


class ReplicaRemoved(Struct, frozen=True):
    replica_id: ReplicaId


class TrustChanged(Struct, frozen=True):
    """Whether the replica's cache counts from now on."""

    replica_id: ReplicaId
    trusted: bool


class TransfersAllowed(Struct, frozen=True):
    """Whether the replica takes part in new transfers from now on."""

    replica_id: ReplicaId
    allowed: bool


class TimerEvent(Struct, frozen=True):
    pass


PeerEvent = PeerReported | PeerHeld
"""What a gateway learns of another one's requests."""
SchedulerEvent = (
    RequestPlaced
    | NotPlaced
    | Reported
    | PeerEvent
    | PeerForgotten
    | Stored
    | CacheChange
    | ReplicaAdded
    | ReplicaRemoved
    | TrustChanged
    | TransfersAllowed
    | TimerEvent
)


class SchedulerListener(Protocol):
    """Who wants to know everything that changes a scheduler: a decision log, for example."""

    def on(self, event: SchedulerEvent, now: float) -> None:
        """A call is done."""
        ...
