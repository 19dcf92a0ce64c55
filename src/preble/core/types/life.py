"""A placement's life as values: what its carrier reports, what listeners hear, and what messages carry.

A fact does not say which placement it is about: each boundary names placements in its own way. Never compiled, as
`plain` is not: messages are decoded into these (docs/decisions/0005).

```
 Started ─▶ FirstToken ─▶ Progress … ─▶ Ended(outcome)
    │  └─ Moved(replica_id) ─┘          ▲
    └──── Lost: its replica has left ───┘        Alive: the carrier is there

 Started with a transfer ─▶ Transferred | TransferFailed ─▶ FirstToken
```
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from preble.core.types.plain import ReplicaId

Count = Annotated[int, Meta(ge=0, lt=2**53)]
LONGEST_S = 1e9
Seconds = Annotated[float, Meta(ge=0.0, le=LONGEST_S)]


class Outcome(StrEnum):
    """How a placement ended. `blames_replica`: whether it counts against the replica."""

    blames_replica: bool

    OK = "ok"
    REJECTED = "rejected"
    """The replica answered with an error status that is the request's fault."""
    REFUSED = "refused"
    """The replica said "not now": 429 or 503."""
    ABORTED = "aborted"
    """The client has gone, or the work was stopped for another reason that is not the replica's."""
    ENGINE_REFUSED = "engine_refused"
    """The replica could not be reached. It has done no work."""
    ENGINE_GONE = "engine_gone"
    """The connection to the replica broke while it worked."""
    ENGINE_FAILED = "engine_failed"
    """The replica answered with a status of 500 or above."""
    ENGINE_TIMEOUT = "engine_timeout"
    """The replica did not answer in time."""
    ENGINE_PROTOCOL_ERROR = "engine_protocol_error"
    """The replica's answer violates the protocol."""
    REQUEST_ERROR = "request_error"
    """The request itself was wrong, such as an answer too large to be kept."""
    ERROR = "error"
    """The carrier failed."""
    WITHOUT_OUTPUT = "without_output"
    """No token was generated. A decision log does not say more of it."""

    @property
    def may_move(self) -> bool:
        """Whether the request may be placed on another replica afterwards: it got no answer."""
        return self not in (Outcome.OK, Outcome.REJECTED)


for _outcome in Outcome:
    _outcome.blames_replica = _outcome.startswith("engine_")


class Fact(Struct, frozen=True, omit_defaults=True, tag_field="fact"):
    """What can happen to a placement."""


class Started(Fact, frozen=True, tag="started"):
    """It goes to its replica. `took_s`: the time of the decision."""

    took_s: Seconds = 0.0


class FirstToken(Fact, frozen=True, tag="first_token"):
    """The first token of its answer has come: the prefill is over."""


class Transferred(Fact, frozen=True, tag="transferred"):
    """What another replica was to send is there: the replica computes the rest of the prompt. `overtaken`: another
    request, which did not wait, has computed it there meanwhile."""

    overtaken: bool = False


class TransferFailed(Fact, frozen=True, tag="transfer_failed"):
    """What another replica was to send does not arrive: the replica computes it too.

    `failed`: whom that blames. `kept_s`: for how long the other one still keeps it for whoever fetches it.
    """

    failed: ReplicaId | None = None
    kept_s: Seconds = 0.0


class Progress(Fact, frozen=True, tag="progress"):
    """The tokens so far: generated, and of the prompt cached by the replica (None if not reported). The last counts."""

    output_tokens: Count = 0
    cached_tokens: Count | None = None


class Moved(Fact, frozen=True, tag="moved"):
    """Its carrier has sent the request to another replica. `source`: the replica before, told to listeners."""

    replica_id: ReplicaId
    source: ReplicaId | None = None


class Lost(Fact, frozen=True, tag="lost"):
    """Its replica has left the rotation, or begins no answer. The answer may still come. `reason`: None at shutdown.

    `silent_since`: since when the replica's machine is silent; None if it still answers or refuses: connections to it
    then break by themselves. `of_source`: it is the one that computes the prompt for the placement's replica.
    """

    reason: str | None = None
    silent_since: float | None = None
    of_source: bool = False


class Alive(Fact, frozen=True, tag="alive"):
    """Its carrier is there. `lease_s`: how long to wait for the next sign from now on, None for no change."""

    lease_s: Seconds | None = None


class Ended(Fact, frozen=True, tag="ended"):
    """It is over. The first end counts.

    `status`: of the replica's answer, as HTTP has it. `retry_after_s`: how long the replica wants no requests.
    `output_tokens`, `cached_tokens`: as in `Progress`; the last one counts where `output_tokens` is None. `text`: the
    error in words. `failed`: whom it blames where that is not its replica but the one that computed its prompt.
    """

    outcome: Outcome = Outcome.OK
    status: Count = 200
    retry_after_s: Seconds = 0.0
    output_tokens: Count | None = None
    cached_tokens: Count | None = None
    text: str = ""
    failed: ReplicaId | None = None


FIRST_TOKEN = FirstToken()
TRANSFERRED = Transferred()
TRANSFER_FAILED = TransferFailed()
Report = Transferred | TransferFailed | FirstToken | Progress | Moved | Alive | Ended
"""What a carrier reports."""
