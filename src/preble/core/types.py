"""The values that cross the scheduler's door: frozen, without behaviour beyond reading themselves.

Token ids travel *packed*: `bytes` holding native-endian unsigned 32-bit integers, four bytes a token. A packed run is
hashable, immutable, shared without copying and compared at memcmp speed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import NewType

ReplicaId = NewType("ReplicaId", str)
RequestId = NewType("RequestId", str)
PackedTokens = NewType("PackedTokens", bytes)
BlockHash = int | bytes
"""An engine's own name for a KV block; opaque, unique only within one replica."""

TOKEN_BYTES = 4
_LONGEST_NAMESPACE = 64
"""Characters of a namespace that is given as it is."""


def pack_tokens(token_ids: Iterable[int]) -> PackedTokens:
    """Pack token ids, four bytes each. O(n).

    Raises: OverflowError or TypeError: an id is not an integer in 0 ... 2**32 - 1.

    >>> len(pack_tokens([1, 2, 3]))
    12
    """
    return PackedTokens(array("I", token_ids).tobytes())


def unpack_tokens(packed: bytes) -> Sequence[int]:
    """The token ids of a packed run. O(n).

    >>> list(unpack_tokens(pack_tokens([7, 4096])))
    [7, 4096]
    """
    return array("I", packed)


def namespace_of(lora_name: str | None = None, cache_salt: str | None = None) -> str:
    """The namespace of prompts computed with this model adapter and this cache salt: equal iff KV may be shared.

    A long one is given by its hash: clients choose salts, and namespaces are kept.

    >>> namespace_of()
    ''
    >>> namespace_of("sql-adapter") == namespace_of(cache_salt="sql-adapter")
    False
    """
    if not lora_name and not cache_salt:
        return ""
    name = f"{lora_name or ''}\x1f{cache_salt or ''}"
    if len(name) <= _LONGEST_NAMESPACE:
        return name
    return blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be placed.

    `prompt`: packed token ids. `max_output_tokens`: the client's limit, None where it gave none.
    `namespace`: prompts of different namespaces never share KV (model adapter, cache salt); "" for the common one.
    `avoid`: replicas that must not get it, for example because they already failed it.
    """

    request_id: RequestId
    prompt: PackedTokens
    max_output_tokens: int | None = None
    namespace: str = ""
    avoid: frozenset[ReplicaId] = frozenset()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @classmethod
    def of(cls, request_id: str, token_ids: Iterable[int], max_output_tokens: int | None = None) -> Request:
        """A request from plain token ids.

        >>> Request.of("r1", [1, 2, 3]).num_prompt_tokens
        3
        """
        return cls(RequestId(request_id), pack_tokens(token_ids), max_output_tokens)


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What the scheduler has to know of a replica.

    `kv_capacity_tokens`: size of its KV cache, None where unknown (then nothing is assumed to be evicted for space).
    `max_prompt_tokens`: longest prompt it accepts, None where unknown.
    `block_size`: tokens a KV block; only whole blocks are cached.
    `reports_events`: its KV events will be fed to `on_stored` / `on_evicted`; without them holdings are a belief.
    """

    replica_id: ReplicaId
    kv_capacity_tokens: int | None = None
    max_prompt_tokens: int | None = None
    block_size: int = 16
    reports_events: bool = False


class Reason(StrEnum):
    """Why a replica was chosen. What each means of E2 and of a baseline: docs/howto/explain.md."""

    EXPLOIT = "exploit"
    EXPLORE = "explore"
    BALANCE = "balance"
    REDIRECT = "redirect"
    REPLICATE = "replicate"
    POLICY = "policy"
    """A rule that does not decide between cache and load, but knows no cache or weighs both at once."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica as the policy saw it for one request. Costs are in seconds of GPU time.

    `matched_tokens`: leading prompt tokens that it is believed to hold. `score`: what a rule that reckons in something
    else than L, M and P compared, in that rule's own unit, lower is better; None for any other.
    """

    replica_id: ReplicaId
    matched_tokens: int
    load_s: float = 0.0
    eviction_s: float = 0.0
    prefill_s: float = 0.0
    score: float | None = None

    @property
    def cost_s(self) -> float:
        return self.load_s + self.eviction_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes and why.

    `matched_tokens`: leading prompt tokens believed to be cached on `replica_id` when it was placed.
    `candidates`: every replica that the policy weighed, the chosen one among them. `untrusted`: replicas whose matches
    counted as none, see `GlobalScheduler.set_trust`.
    """

    request_id: RequestId
    replica_id: ReplicaId
    reason: Reason
    matched_tokens: int
    num_prompt_tokens: int
    candidates: Sequence[Candidate] = field(default=(), repr=False)
    untrusted: tuple[ReplicaId, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixReplication:
    """A prompt prefix of `prefix_tokens` tokens is served by one more replica from now on (`added`), or by one less.

    `num_replicas`: those that serve it now.
    """

    replica_id: ReplicaId
    prefix_tokens: int
    added: bool
    num_replicas: int


@dataclass(slots=True)
class CacheDrift:
    """Prompt tokens that a replica was believed to have cached, and those it reported, over requests that it reported.

    Only tokens count that had been computed before the request was placed.
    """

    predicted_tokens: int = 0
    reported_tokens: int = 0
    num_requests: int = 0


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A replica has cached blocks that follow one another.

    `parent`: the block before the first one, None at the start of a prompt. `tokens`: packed ids of all the blocks,
    exactly `len(block_hashes) * block_size` of them. `is_orphan`: whoever reports this has never heard of the parent
    either, for example because it was stored before anybody listened.
    """

    replica_id: ReplicaId
    block_hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    tokens: PackedTokens
    block_size: int
    namespace: str = ""
    is_orphan: bool = False


@dataclass(frozen=True, slots=True)
class BlocksEvicted:
    """A replica no longer caches these blocks."""

    replica_id: ReplicaId
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """A replica's whole cache is gone: reset, restart, or a gap in its events that cannot be filled.

    `is_past`: it is told late, after the fact, with all that has been stored since still to come. What requests have
    stored lately stays promised.
    """

    replica_id: ReplicaId
    is_past: bool = False


@dataclass(frozen=True, slots=True)
class EventsLost:
    """A replica's KV events do not arrive any more. Its cache is estimated until the next `CacheCleared`."""

    replica_id: ReplicaId


KvEvent = BlocksStored | BlocksEvicted | CacheCleared | EventsLost
