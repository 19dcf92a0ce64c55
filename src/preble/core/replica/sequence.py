"""One request inside a replica: its tokens, the hashes of its full blocks, and the blocks that it holds."""

from __future__ import annotations

from dataclasses import dataclass

from preble.core.replica.prefix_cache import hash_blocks
from preble.core.types import TOKEN_BYTES, PackedTokens, Request, RequestId


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

    `blocks` have room for the KV of `num_slots` tokens; `num_computed` of them are computed, and the first
    `num_inserted` blocks are in the prefix cache. `num_tokens`: of the prompt and the output so far; `final_tokens`:
    with all output. `hashes`: of every block that will be filled; the last token is never computed, since nothing
    follows it. `last_match`: blocks found in the cache at the last look. `runs`: admitted, and not preempted or ended
    since.

    While it decodes, `num_computed` and `num_tokens` grow by one in each step of its replica, but are not written each
    time: `decode_from(step)` starts counting, and `settle(step)` brings them up to date. `turn`: its place among the
    decoding sequences.
    """

    __slots__ = (
        "_arrived_at",
        "_block_size",
        "_computed_at_step_0",
        "_first_token_at",
        "_num_cached",
        "_started_at",
        "_tokens",
        "blocks",
        "final_tokens",
        "hashes",
        "last_match",
        "num_computed",
        "num_inserted",
        "num_preemptions",
        "num_slots",
        "num_tokens",
        "request",
        "runs",
        "turn",
    )

    def __init__(self, request: Request, output: PackedTokens, block_size: int, now: float) -> None:
        self.request = request
        self.num_tokens = request.num_prompt_tokens
        self.final_tokens = self.num_tokens + len(output) // TOKEN_BYTES
        self.num_preemptions = self.last_match = self.turn = 0
        self._computed_at_step_0 = 0
        self._tokens = request.prompt + output[:-TOKEN_BYTES]
        self.hashes = hash_blocks(self._tokens, block_size, namespace=request.namespace)
        self._block_size = block_size
        self._arrived_at = self._started_at = now
        self._first_token_at: float | None = None
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

    def end_prefill(self, now: float) -> None:
        """All tokens are computed, which gives one more."""
        if self._first_token_at is None:
            self._first_token_at = now
        self.num_tokens += 1

    def decode_from(self, step: int) -> None:
        """Count one token for each step from `step` on."""
        self._computed_at_step_0 = self.num_computed - step

    def settle(self, step: int) -> None:
        """Bring the counts of a decoding sequence up to the beginning of `step`."""
        self.num_computed = self._computed_at_step_0 + step
        self.num_tokens = self.num_computed + 1

    def next_due(self, step: int) -> int:
        """Return the first step from `step` on that needs a new block, fills one, or makes the last token."""
        num_computed = self._computed_at_step_0 + step
        if num_computed == self.num_slots:
            return step
        to_fill_block = self._block_size - 1 - num_computed % self._block_size
        return step + min(to_fill_block, self.final_tokens - 2 - num_computed)

    def packed_blocks(self, start: int, stop: int) -> PackedTokens:
        """Return the packed tokens of blocks `start` ... `stop` - 1."""
        block_bytes = self._block_size * TOKEN_BYTES
        return PackedTokens(self._tokens[start * block_bytes : stop * block_bytes])

    def finished(self, now: float) -> Finished:
        """Return the record of a sequence that has all its output."""
        assert self._first_token_at is not None
        num_prompt = self.request.num_prompt_tokens
        return Finished(
            request_id=self.request.request_id,
            num_prompt_tokens=num_prompt,
            num_cached_tokens=self._num_cached or 0,
            num_output_tokens=self.final_tokens - num_prompt,
            num_preemptions=self.num_preemptions,
            arrived_at=self._arrived_at,
            started_at=self._started_at,
            first_token_at=self._first_token_at,
            finished_at=now,
        )
