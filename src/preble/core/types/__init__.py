"""The values that go into the schedulers and come out: requests, replicas, placements, cache events.

Token ids travel *packed*: `bytes` holding native-endian unsigned 32-bit integers, four bytes per token. A packed run is
hashable, immutable, shared without copying and compared at memcmp speed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from math import inf
from typing import Final, NewType, overload

from preble.core.types.plain import NO_TARGET as NO_TARGET
from preble.core.types.plain import NOTHING_LEARNED as NOTHING_LEARNED
from preble.core.types.plain import Candidate as Candidate
from preble.core.types.plain import Learned as Learned
from preble.core.types.plain import LearnedLength as LearnedLength
from preble.core.types.plain import ReplicaId as ReplicaId
from preble.core.types.plain import ReplicaSpec as ReplicaSpec
from preble.core.types.plain import Role as Role
from preble.core.types.plain import Target as Target
from preble.core.types.plain import Ways as Ways

RequestId = NewType("RequestId", str)
PeerId = NewType("PeerId", str)
"""Another gateway of the same cluster."""
PackedTokens = NewType("PackedTokens", bytes)
BlockHash = int | bytes
"""An engine's own name for a KV block; opaque, unique only within one replica."""

TOKEN_BYTES: Final = 4
HASH_BYTES: Final = 8
"""Of a packed token id, and of a packed block hash."""
_LONGEST_NAMESPACE: Final = 64
"""The longest namespace that is kept as it is, in characters."""


def pack_tokens(token_ids: Iterable[int]) -> PackedTokens:
    """Pack token ids, four bytes each. O(n).

    Raises: OverflowError or TypeError: an id is not an integer in 0 ... 2**32 - 1.

    >>> len(pack_tokens([1, 2, 3]))
    12
    """
    return PackedTokens(array("I", token_ids).tobytes())


def unpack_tokens(packed: bytes) -> Sequence[int]:
    """Return the token ids of a packed run. O(n).

    >>> list(unpack_tokens(pack_tokens([7, 4096])))
    [7, 4096]
    """
    return array("I", packed)


class PackedHashes(Sequence[BlockHash]):
    """Block hashes of 64 bits each, native-endian in one piece: equal to a tuple of the same integers.

    >>> hashes = PackedHashes(array("Q", [3, 2**64 - 1]).tobytes())
    >>> hashes == (3, 2**64 - 1), hashes[0], hashes[1:] == (2**64 - 1,), len(hashes)
    (True, 3, True, 2)
    """

    __slots__ = ("packed", "signed")

    def __init__(self, packed: bytes, signed: bool = False) -> None:
        """`signed`: whether they are integers with a sign."""
        self.packed = packed
        self.signed = signed

    def unpacked(self) -> Sequence[int]:
        return array("q" if self.signed else "Q", self.packed)

    def __len__(self) -> int:
        return len(self.packed) // HASH_BYTES

    def __iter__(self) -> Iterator[int]:
        return iter(self.unpacked())

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        found = self.unpacked()[at]
        return found if isinstance(found, int) else tuple(found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


BlockHashes = tuple[BlockHash, ...] | PackedHashes


def namespace_of(lora_name: str | None = None, cache_salt: str | None = None) -> str:
    """Return the namespace of prompts computed with this model adapter and this cache salt: equal if and only if they
    may share KV.

    A long one becomes a hash: clients choose salts, and the scheduler keeps namespaces.

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


@dataclass(slots=True, unsafe_hash=True, init=False)
class Request:
    """One prompt to be placed.

    `prompt`: packed token ids. `max_output_tokens`: the client's limit, None where it gave none.
    `namespace`: prompts of different namespaces never share KV (model adapter, cache salt); "" for the common one.
    `avoid`: replicas that must not get the request, for example because they have failed it already. `model`: the base
    model that must answer it, "" for any. Only replicas of that model get it, and it shares KV only with its prompts.
    `keeps_kv`: whether the replica keeps KV that later prompts can use; embeddings and the like leave none, so they are
    placed by load alone. `first_token_by`: when its first token must have come, in the scheduler's time; `tpot_s`:
    seconds that each further one may take. Both infinite where nobody has asked for that; `has_target` if for any.
    `splits`: whether its sender can ask two replicas: one that computes the prompt, and one that decodes the answer.
    """

    request_id: RequestId
    prompt: PackedTokens
    max_output_tokens: int | None = None
    namespace: str = ""
    avoid: frozenset[ReplicaId] = frozenset()
    model: str = ""
    keeps_kv: bool = True
    first_token_by: float = inf
    tpot_s: float = inf
    splits: bool = True
    num_prompt_tokens: int = field(init=False, repr=False, compare=False)
    has_target: bool = field(init=False, repr=False, compare=False)

    def __init__(  # by hand, here and in `Placement`: compiled, that takes a third of the time
        self,
        request_id: RequestId,
        prompt: PackedTokens,
        max_output_tokens: int | None = None,
        namespace: str = "",
        avoid: frozenset[ReplicaId] = frozenset(),
        model: str = "",
        keeps_kv: bool = True,
        first_token_by: float = inf,
        tpot_s: float = inf,
        splits: bool = True,
    ) -> None:
        if not isinstance(prompt, bytes):
            raise TypeError(
                f"Request takes packed token ids, not a {type(prompt).__name__}: use Request.of, or pack_tokens"
            )
        self.request_id = request_id
        self.prompt = prompt
        self.max_output_tokens = max_output_tokens
        self.namespace = namespace
        self.avoid = avoid
        self.model = model
        self.keeps_kv = keeps_kv
        self.first_token_by = first_token_by
        self.tpot_s = tpot_s
        self.splits = splits
        self.has_target = first_token_by < inf or tpot_s < inf
        self.num_prompt_tokens = len(prompt) // TOKEN_BYTES

    def promise(self, target: Target, arrived_at: float) -> None:
        """Ask for a target, before the request is placed. `arrived_at`: when it came, in the scheduler's time."""
        self.first_token_by = inf if target.ttft_s is None else arrived_at + target.ttft_s
        self.tpot_s = inf if target.tpot_s is None else target.tpot_s
        self.has_target = self.first_token_by < inf or self.tpot_s < inf

    @classmethod
    def of(cls, request_id: str, token_ids: Iterable[int], max_output_tokens: int | None = None) -> Request:
        """Return a request from plain token ids.

        >>> Request.of("r1", [1, 2, 3]).num_prompt_tokens
        3
        """
        return cls(RequestId(request_id), pack_tokens(token_ids), max_output_tokens)


class Tier(StrEnum):
    """Where KV blocks are kept besides the engine's own memory. They are loaded from there, which takes time."""

    HOST = "host"
    """The memory of the replica's host."""
    STORE = "store"
    """A disk, or a store that several replicas share."""


class Reason(StrEnum):
    """Why a policy chose a replica. What each reason means for each policy: docs/howto/explain.md."""

    EXPLOIT = "exploit"
    EXPLORE = "explore"
    BALANCE = "balance"
    REDIRECT = "redirect"
    REPLICATE = "replicate"
    POLICY = "policy"
    """For a rule that knows no cache, or weighs cache and load at once."""
    SCHEDULER_AWAY = "scheduler_away"
    """Placed by load in a front-end process while the scheduler process is being started again."""


class TransferKind(StrEnum):
    """What the source of a transfer does for it."""

    COPY = "copy"
    """It sends what it has cached already."""
    PREFILL = "prefill"
    """It computes the prompt, up to the first token, and sends what the other one lacks: a split."""


KV_LEASE_S = 30.0
"""How long the source of a split keeps a prompt that nobody fetches. It is the default of vLLM with NIXL."""
LONGEST_KV_LEASE_S = 600.0
"""Of a prompt that a source is said to keep for longer, nothing counts as in use after so long."""
PART_OF_LEASE = 0.5
"""Within which a source must have computed the prompt, so that nothing is fetched late. Else the target computes it."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """KV that another replica is to send to the one on which a request was placed, before that one computes the rest.

    `tokens`: those that the replica lacks; for a copy they are the last of the placement's `matched_tokens`. `seconds`:
    how long it takes from the placement on, other transfers on the same links included.
    """

    source: ReplicaId
    tokens: int
    seconds: float
    kind: TransferKind = TransferKind.COPY


@dataclass(slots=True, unsafe_hash=True, init=False)
class Placement:
    """Where a request goes and why. Like `Request` made once and not changed; a frozen one takes eight times as long.

    `matched_tokens`: leading prompt tokens expected to be cached on `replica_id` when it was placed, copied ones
    included; where another replica computes the prompt, on that one.
    `candidates`: every replica that the policy weighed, the chosen one among them. `untrusted`: replicas whose matches
    did not count, see `GlobalScheduler.set_trust`. `predicted_ttft_s`, `predicted_tpot_s`: seconds from here to the
    first token, and between two further ones; None where nobody has predicted it. `transfer`: what another replica is
    to send first, None for nothing; its end is to be reported with `GlobalScheduler.on_transferred` or
    `on_transfer_failed`. `predicted_ttft_p98_s`, `predicted_tpot_p98_s`: what 98 of 100 keep, by how the last
    predictions turned out; None while too few have.
    """

    request_id: RequestId
    replica_id: ReplicaId
    reason: Reason
    matched_tokens: int
    num_prompt_tokens: int
    candidates: Sequence[Candidate] = field(default=(), repr=False)
    untrusted: tuple[ReplicaId, ...] = ()
    predicted_ttft_s: float | None = None
    transfer: Transfer | None = None
    predicted_ttft_p98_s: float | None = None
    predicted_tpot_s: float | None = None
    predicted_tpot_p98_s: float | None = None

    def __init__(
        self,
        request_id: RequestId,
        replica_id: ReplicaId,
        reason: Reason,
        matched_tokens: int,
        num_prompt_tokens: int,
        candidates: Sequence[Candidate] = (),
        untrusted: tuple[ReplicaId, ...] = (),
        predicted_ttft_s: float | None = None,
        transfer: Transfer | None = None,
        predicted_ttft_p98_s: float | None = None,
        predicted_tpot_s: float | None = None,
        predicted_tpot_p98_s: float | None = None,
    ) -> None:
        self.request_id = request_id
        self.replica_id = replica_id
        self.reason = reason
        self.matched_tokens = matched_tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.candidates = candidates
        self.untrusted = untrusted
        self.predicted_ttft_s = predicted_ttft_s
        self.transfer = transfer
        self.predicted_ttft_p98_s = predicted_ttft_p98_s
        self.predicted_tpot_s = predicted_tpot_s
        self.predicted_tpot_p98_s = predicted_tpot_p98_s

    @property
    def prefill_source(self) -> ReplicaId | None:
        """The replica that computes the prompt, where that is another one."""
        transfer = self.transfer
        return transfer.source if transfer is not None and transfer.kind is TransferKind.PREFILL else None


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
    """Prompt tokens that a replica was expected to have cached and those that it reported, over requests with a report.

    Only tokens count that had been computed before the request was placed.
    """

    predicted_tokens: int = 0
    reported_tokens: int = 0
    num_requests: int = 0


@dataclass(slots=True, unsafe_hash=True)
class BlocksStored:
    """A replica has in its engine's memory now blocks that follow one another, or one copy more of each.

    As `Placement` made once and not changed.

    `parent`: the block before the first one, None at the start of a prompt. `tokens`: packed ids of all the blocks,
    exactly `len(block_hashes) * block_size` of them. `past_is_cut`: the reporter could not hear of all that
    was stored before, perhaps not of the parent either. `namespace`: see `Request`; blocks below a known parent are in
    the parent's, whatever it says.
    """

    replica_id: ReplicaId
    block_hashes: BlockHashes
    parent: BlockHash | None
    tokens: PackedTokens
    block_size: int
    namespace: str = ""
    past_is_cut: bool = False


@dataclass(slots=True, unsafe_hash=True)
class BlocksEvicted:
    """A replica has one copy less of each of these blocks. `tier`: where it was, None for the engine's memory.

    As `Placement` made once and not changed.
    """

    replica_id: ReplicaId
    block_hashes: BlockHashes
    tier: Tier | None = None


@dataclass(frozen=True, slots=True)
class BlocksDemoted:
    """These blocks have left the engine's memory; a copy is left in `tier`, from where the replica can load it."""

    replica_id: ReplicaId
    block_hashes: BlockHashes
    tier: Tier = Tier.HOST


@dataclass(frozen=True, slots=True)
class BlocksShared:
    """The replica has put copies of these blocks, in any order, into its store: all replicas on it can load them."""

    replica_id: ReplicaId
    block_hashes: BlockHashes


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """A replica's whole cache is gone: reset, restart, or a gap in its events that cannot be filled.

    `is_past`: the event comes late, and reports of all that was stored since will follow. So prompts of recent requests
    still count. `engine_only`: what is in the host's memory has survived. A shared store always does.
    """

    replica_id: ReplicaId
    is_past: bool = False
    engine_only: bool = False


@dataclass(frozen=True, slots=True)
class EventsLost:
    """A replica's KV events do not arrive any more. Its cache is estimated until the next `CacheCleared`."""

    replica_id: ReplicaId


CacheChange = BlocksEvicted | BlocksDemoted | BlocksShared | CacheCleared | EventsLost
"""Every KV event but `BlocksStored`."""

KvEvent = BlocksStored | CacheChange
