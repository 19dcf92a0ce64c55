"""How much of each waiting prompt vLLM has cached, cheaply enough to ask before each batch.

vLLM's own answer (`find_longest_cache_hit`) looks at each block of the prompt: 90 to 180 µs for 4,000 tokens. Two
ways are cheaper. Neither counts as a use of a block or enters vLLM's statistics.

- Plain models (one kind of cache, full attention): block hashes form a chain, and parents are evicted after their
  children, so that all cached blocks of a prompt come before all others. Two blocks show whether the last answer still
  holds; a bisection finds a new one.
- Other models (sliding windows, state-space layers, several kinds of layers, EAGLE's dropped blocks): before each
  batch vLLM is asked about two new requests and about one of the others in turn. Between its turns a request keeps its
  last answer; a request without an answer counts as a miss.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator  # type: ignore[import-not-found]
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id  # type: ignore[import-not-found]
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager  # type: ignore[import-not-found]

from preble.integrations.hit_ratio_sampler import HitRatioSampler

NEW_PER_BATCH, TURNS_PER_BATCH = 2, 1
"""Lookups before each batch: at 100 µs each, a small part of any batch that is worth ordering."""


class CachedTokens(Protocol):
    """The cached leading tokens of waiting requests. Its length: the requests that it remembers."""

    def __len__(self) -> int: ...

    def new_batch(self) -> None:
        """Start a new turn; call it before each batch."""
        ...

    def of(self, request: Any) -> int:
        """Return how many usable tokens of this vLLM request are cached now."""
        ...

    def forget(self, request_id: str) -> None:
        """Forget a request that no longer waits."""
        ...


def cached_tokens_in(manager: Any) -> CachedTokens:
    """Return the cheapest way for the models of this vLLM `KVCacheManager`."""
    return ChainedBlocks(manager) if _is_plain(manager) else AskedInTurn(manager)


def _is_plain(manager: Any) -> bool:
    """Return whether one chain of whole blocks decides what is cached."""
    coordinator = manager.coordinator
    if type(coordinator) is not UnitaryKVCacheCoordinator or coordinator.eagle_group_ids:
        return False
    [only] = coordinator.single_type_managers
    in_whole_blocks = only.block_size == manager.block_pool.hash_block_size
    return type(only) is FullAttentionManager and in_whole_blocks and only.dcp_world_size == only.pcp_world_size == 1


class _Chain:
    """The blocks of one waiting prompt: the first `usable` of `hashes`, of which the first `known` are cached.

    `last` and `next` are the keys in vLLM's table of those on either side of that border, None at an end.
    """

    __slots__ = ("hashes", "known", "last", "next", "num_tokens", "usable")

    def __init__(self, hashes: Sequence[bytes], usable: int, num_tokens: int) -> None:
        self.hashes = hashes
        self.usable = usable
        self.num_tokens = num_tokens
        self.set_known(0)

    def set_known(self, known: int) -> None:
        self.known = known
        self.last = _key_of(self.hashes[known - 1]) if known else None
        self.next = _key_of(self.hashes[known]) if known < self.usable else None


def _key_of(block_hash: bytes) -> bytes:
    """Return the id of the only KV cache group."""
    key: bytes = make_block_hash_with_group_id(block_hash, 0)
    return key


class ChainedBlocks:
    """Bisects a prompt's block hashes. O(1) if nothing has changed, O(log blocks) otherwise."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._pool = manager.block_pool
        self._block_size: int = self._pool.hash_block_size
        self._chains: dict[str, _Chain] = {}
        self._found = 0
        """The blocks found for the previous request: most often the same prefix, newly cached or evicted."""

    def __len__(self) -> int:
        return len(self._chains)

    def new_batch(self) -> None:
        # A cache reset replaces the table, so fetch it each time.
        self._find: Callable[[bytes], object] = self._pool.cached_block_hash_to_block.get_one_block

    def of(self, request: Any) -> int:
        chain = self._chains.get(request.request_id)
        if chain is None or chain.num_tokens != request.num_tokens:
            chain = self._chains[request.request_id] = self._chain_of(request)
        if not self._holds(chain):
            self._update(chain)
        return chain.known * self._block_size

    def _chain_of(self, request: Any) -> _Chain:
        """Return the usable cached tokens: the last token is always computed."""
        usable = 0
        if self._manager.prefix_cache_lookup_enabled(request):
            usable = min(len(request.block_hashes), (request.num_tokens - 1) // self._block_size)
        return _Chain(request.block_hashes, usable, request.num_tokens)

    def _holds(self, chain: _Chain) -> bool:
        return (chain.last is None or self._find(chain.last) is not None) and (
            chain.next is None or self._find(chain.next) is None
        )

    def _update(self, chain: _Chain) -> None:
        chain.set_known(min(self._found, chain.usable))
        if not self._holds(chain):
            chain.set_known(bisect_left(chain.hashes, True, hi=chain.usable, key=self._is_missing))
        self._found = chain.known

    def _is_missing(self, block_hash: bytes) -> bool:
        return self._find(_key_of(block_hash)) is None

    def forget(self, request_id: str) -> None:
        self._chains.pop(request_id, None)


class AskedInTurn:
    """Asks vLLM about a few requests before each batch."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._turns = HitRatioSampler[Any](self._ask, new_per_batch=NEW_PER_BATCH, turns_per_batch=TURNS_PER_BATCH)

    def __len__(self) -> int:
        return len(self._turns)

    def new_batch(self) -> None:
        self._turns.new_batch()

    def of(self, request: Any) -> int:
        return self._turns.of(request.request_id, request)

    def _ask(self, request: Any) -> int:
        if not self._manager.prefix_cache_lookup_enabled(request):
            return 0
        found = self._manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return int(found[1])

    def forget(self, request_id: str) -> None:
        self._turns.forget(request_id)
