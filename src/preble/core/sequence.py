"""One request inside a replica: its tokens, the hashes of its full blocks, and the blocks that it holds."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from preble.core.prefix_cache import hash_blocks
from preble.core.types import PackedTokens, Request, RequestId


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that has all its output. Times are in seconds, on the scheduler's clock.

    `num_cached_tokens`: of its prompt, found in the cache when it first ran. `started_at`: when it first ran.
    """

    request_id: RequestId
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    arrived_at: float
    started_at: float
    first_token_at: float
    finished_at: float


class Sequence:
    """State of one request; `LocalScheduler` alone changes it.

    `blocks` have `num_slots` slots for the first tokens, of which the first `num_computed` have their KV; the first
    `num_inserted` blocks are in the prefix cache. `hashes`: of every block that the known tokens fill.
    `last_match`: blocks found in the cache when last asked. `runs`: admitted, and not preempted or ended since.
    """

    __slots__ = (
        "_arrived_at",
        "_block_size",
        "_first_token_at",
        "_num_cached",
        "_started_at",
        "blocks",
        "hashes",
        "last_match",
        "num_computed",
        "num_inserted",
        "num_output",
        "num_preemptions",
        "num_slots",
        "num_tokens",
        "request",
        "runs",
        "target",
        "tokens",
    )

    def __init__(self, request: Request, target: int, block_size: int, now: float) -> None:
        self.request = request
        self.target = target
        """Output tokens after which it ends."""
        self.tokens = array("I", request.prompt)
        self.num_tokens = len(self.tokens)
        self.hashes = hash_blocks(request.prompt, block_size, namespace=request.namespace)
        self.num_output = self.num_preemptions = self.last_match = 0
        self._block_size = block_size
        self._arrived_at = self._started_at = self._first_token_at = now
        self._num_cached: int | None = None
        self.blocks: list[int] = []
        self.forget_blocks()

    def start(self, blocks: list[int], num_matched: int, now: float) -> None:
        """Run on `blocks`, the first `num_matched` of which came from the cache."""
        self.blocks = blocks
        self.num_slots = len(blocks) * self._block_size
        self.num_inserted = num_matched
        self.num_computed = num_matched * self._block_size
        self.runs = True
        if self._num_cached is None:
            self._num_cached = self.num_computed
            self._started_at = now

    def forget_blocks(self) -> None:
        """Stop running: preempted or ended. The caller has released the blocks."""
        self.blocks = []
        self.num_slots = self.num_computed = self.num_inserted = 0
        self.runs = False

    def append(self, token: int, now: float) -> None:
        """Add a generated token; hash its block if it fills one."""
        if not self.num_output:
            self._first_token_at = now
        self.tokens.append(token)
        self.num_tokens += 1
        self.num_output += 1
        if self.num_tokens % self._block_size == 0:
            tail = self.tokens[-self._block_size :].tobytes()
            parent = self.hashes[-1] if self.hashes else None
            self.hashes += hash_blocks(tail, self._block_size, parent, self.request.namespace)

    def packed_blocks(self, start: int, stop: int) -> PackedTokens:
        """The packed tokens of blocks `start` ... `stop` - 1."""
        return PackedTokens(self.tokens[start * self._block_size : stop * self._block_size].tobytes())

    def finished(self, now: float) -> Finished:
        """The record of a sequence that has all its output."""
        return Finished(
            request_id=self.request.request_id,
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_cached_tokens=self._num_cached or 0,
            num_output_tokens=self.num_output,
            num_preemptions=self.num_preemptions,
            arrived_at=self._arrived_at,
            started_at=self._started_at,
            first_token_at=self._first_token_at,
            finished_at=now,
        )
