"""The messages of the scheduler's socket, both ways. A change of their form raises `VERSION`.

On the wire a message is an array that begins with its tag; docs/reference/scheduler-protocol.md describes each one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from msgspec import Struct

from preble import errors
from preble.core.types import Candidate, Placement, Reason, ReplicaId, RequestId, Transfer
from preble.core.types.life import Lost, Report
from preble.engines import EngineInfo
from preble.errors import PrebleError
from preble.serving.telemetry.numbers import Reading
from preble.serving.terms import MonotonicSeconds, Terms

VERSION = 16


class Message(Struct, array_like=True):
    """One message."""


# to the scheduler process


class Hello(Message, tag=0):
    """The first message. `name`: of the carrier, for logs. `tokenizer`: what makes its ids (`TokenSource.identity`)."""

    version: int
    name: str
    tokenizer: str = ""


class Admit(Message, tag=1):
    """May this request be served? `again`: it was admitted before the scheduler process restarted."""

    number: int
    terms: Terms
    again: bool = False


class Leave(Message, tag=2):
    """An admitted request is over."""

    number: int


class Place(Message, tag=3):
    """Place a prompt of an admitted request. `tokens`: its ids, four bytes each, little-endian. `keeps_kv`,
    `splits`: see `core.types.Request`. `terms`: of a request that has sent no `Admit`: it is admitted first."""

    number: int
    admitted: int
    request_id: str
    tokens: bytes
    max_output_tokens: int | None = None
    namespace: str = ""
    avoid: Sequence[str] = ()
    keeps_kv: bool = True
    terms: Terms | None = None
    splits: bool = True


class PlaceAgain(Message, tag=4):
    """The placement `ended` has failed: place its prompt on another replica."""

    number: int
    ended: int


class Withdraw(Message, tag=5):
    """Nobody waits for this placement any more."""

    number: int


class PlacementReport(Message, tag=6):
    """What has happened to a placement; see `preble.core.types.life`. The carrier hears with it that a replica has left
    (`Lost`), and reports the rest. `leaves`: in place of a `Leave` after an end, its number."""

    number: int
    fact: Report | Lost
    leaves: int | None = None


class Suspect(Message, tag=7):
    """Check this replica: it did not answer a request that was not placed, such as one to tokenize."""

    replica_id: str


class Heard(Message, tag=8):
    """By placement, when its replica last sent anything, in seconds of the host's monotonic clock. Send it every
    second while requests are under way, else every five, even empty: a sign of life, which `HeardReply` answers."""

    at: dict[int, MonotonicSeconds] = {}


class PageRequest(Message, tag=9):
    """An HTTP request that the scheduler process answers: pages, metrics, changes by admins."""

    number: int
    method: str
    path: str
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes = b""


class MetricsReport(Message, tag=10):
    """A carrier's own metrics: the answer to `Count`, and also sent every five seconds with number 0."""

    number: int
    readings: list[Reading]


# from the scheduler process


class Welcome(Message, tag=0):
    """The answer to `Hello`."""

    version: int


class LinkedReplica(Struct, array_like=True, frozen=True):
    """One live replica. `url`: of its server. `adapter`: `module:Class` of its client. `takes_ids`:
    it answers the token ids that this carrier's tokenizer makes as it answers their text. `kv_peer`, `num_ranks`: see
    `Engine`."""

    replica_id: str
    url: str
    adapter: str
    info: EngineInfo
    rank: int | None = None
    model_path: str | None = None
    held_back: bool = False
    takes_ids: bool = False
    kv_peer: str | None = None
    num_ranks: int = 1


class Replicas(Message, tag=1):
    """All live replicas. Sent after `Welcome`, and whenever one of them changes."""

    rows: Sequence[LinkedReplica]


class Admitted(Message, tag=2):
    """The request may be placed. `request_id`: a new one if the client's is in use."""

    number: int
    request_id: str


class PlacedOn(Message, tag=3):
    """The prompt goes to this replica. `transfer`: what another one sends it; of the kind `prefill` the carrier asks
    both."""

    number: int
    request_id: str
    replica_id: str
    reason: Reason
    matched_tokens: int
    num_prompt_tokens: int
    placed_at: float
    candidates: Sequence[Candidate] = ()
    predicted_ttft_s: float | None = None
    predicted_ttft_p98_s: float | None = None
    predicted_tpot_s: float | None = None
    predicted_tpot_p98_s: float | None = None
    transfer: Transfer | None = None


class Refused(Message, tag=4):
    """The message with this number is refused. `kind`: the error's class. `details`: its fields."""

    number: int
    kind: str
    text: str
    details: dict[str, Any]


class PageAnswer(Message, tag=5):
    """The answer to `PageRequest`."""

    number: int
    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


class Count(Message, tag=7):
    """Send your metrics."""

    number: int


class HeardReply(Message, tag=8):
    """The answer to `Heard`."""


ToScheduler: TypeAlias = (
    Hello
    | Admit
    | Leave
    | Place
    | PlaceAgain
    | Withdraw
    | PlacementReport
    | Suspect
    | Heard
    | PageRequest
    | MetricsReport
)
FromScheduler: TypeAlias = (
    Welcome | Replicas | Admitted | PlacedOn | Refused | PlacementReport | PageAnswer | Count | HeardReply
)

_KINDS: Mapping[str, type[PrebleError]] = MappingProxyType(
    {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, PrebleError)}
)


def refused(number: int, error: PrebleError) -> Refused:
    """Return the message for an error."""
    return Refused(number, type(error).__name__, str(error), vars(error))


def error_of(kind: str, text: str, details: Mapping[str, Any] = MappingProxyType({})) -> Exception:
    """Return the error that a message names.

    >>> error_of("Overloaded", "too many", {"retry_after_s": 3.0}).retry_after_s
    3.0
    """
    if (of_ours := _KINDS.get(kind)) is not None:
        return of_ours(text, **details)
    return Exception(f"{kind}: {text}")


def placement_of(message: PlacedOn) -> Placement:
    """Return the placement in a message."""
    return Placement(
        RequestId(message.request_id),
        ReplicaId(message.replica_id),
        message.reason,
        message.matched_tokens,
        message.num_prompt_tokens,
        message.candidates,
        predicted_ttft_s=message.predicted_ttft_s,
        transfer=message.transfer,
        predicted_ttft_p98_s=message.predicted_ttft_p98_s,
        predicted_tpot_s=message.predicted_tpot_s,
        predicted_tpot_p98_s=message.predicted_tpot_p98_s,
    )
