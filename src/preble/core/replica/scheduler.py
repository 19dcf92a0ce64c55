"""The local scheduler: what one replica computes in its next iteration. The one interface of the local half.

Chunked prefill with a token budget: running decodes first, then the prompt that is being prefilled, then waiting
requests in the queue's order. KV blocks come from the prefix cache. If a decode finds no free block, the newest running
sequence is preempted: it loses its blocks, waits in front of all others, and is computed again later.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from itertools import takewhile

from preble.core.costs.model import CostModel
from preble.core.replica.decoding import Decoding
from preble.core.replica.prefix_cache import PrefixCache, hash_blocks
from preble.core.replica.sequence import Finished, Sequence
from preble.core.replica.waiting_queue import QueueOrder, WaitingQueue
from preble.core.types import TOKEN_BYTES, KvEvent, PackedTokens, ReplicaId, Request, RequestId
from preble.errors import PromptTooLong, RequestError, UnknownRequest


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """`new_tokens` of a prompt to be computed after `tokens_before` that are in the cache already."""

    request_id: RequestId
    new_tokens: int
    tokens_before: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One iteration. `decode_context_tokens`: tokens before the new one, of all decoding sequences together.

    `num_admitted`: requests that run for the first time, not those that return after a preemption.
    """

    decodes: tuple[RequestId, ...]
    decode_context_tokens: int
    prefills: tuple[PrefillChunk, ...]
    preempted: tuple[RequestId, ...]
    num_admitted: int

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum([chunk.new_tokens for chunk in self.prefills])

    def iteration_s(self, model: CostModel) -> float:
        """Return seconds that a replica takes to compute it."""
        prefills = [(chunk.new_tokens, chunk.tokens_before) for chunk in self.prefills]
        computed_s = model.iteration_s(prefills, len(self.decodes), self.decode_context_tokens)
        return computed_s + model.admission_s(self.num_admitted)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The requests that got a token from an iteration, by a decode or by the end of their prefill, and those that
    ended.
    """

    decoded: tuple[RequestId, ...]
    prefilled: tuple[RequestId, ...]
    finished: tuple[Finished, ...]


@dataclass(slots=True)
class LocalStats:
    """Counters since the start; tokens, except preemptions. `queries` and `hits` count each prompt once."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Lent:
    """Blocks that stay in the prefix cache while another replica copies them."""

    hashes: frozenset[int]
    blocks: list[int]


class LocalScheduler:
    """The scheduler of one replica. Synchronous and deterministic; call `next_batch` and `complete` in turn.

    `max_batch_tokens`: new tokens in one iteration; at least `max_running`, so that every decode always fits.
    `drops_last_block`: the last block that is found is computed all the same, as with some speculative decoding.
    """

    def __init__(
        self,
        *,
        replica_id: ReplicaId,
        num_blocks: int,
        block_size: int = 16,
        max_batch_tokens: int = 2048,
        max_running: int = 256,
        order: QueueOrder = QueueOrder.FCFS,
        num_groups: int = 10,
        drops_last_block: bool = False,
    ) -> None:
        if not 1 <= max_running <= max_batch_tokens:
            raise ValueError(f"need 1 <= max_running <= max_batch_tokens, got {max_running} and {max_batch_tokens}")
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.stats = LocalStats()
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._num_dropped = int(drops_last_block)
        self._cache = PrefixCache(replica_id, num_blocks, block_size)
        self._queue = WaitingQueue(self._cached_tokens_of, order, num_groups)
        self._sequences: dict[str, Sequence] = {}
        self._lent: list[Lent] = []
        self._decoding = Decoding()
        """Running sequences with at least one output token, in the order of their last admission."""
        self._prefilling: Sequence | None = None
        """The one prompt that is partly computed. It took the rest of a budget, so no running sequence is newer."""
        self._batch: Batch | None = None
        """The batch that has not been completed."""
        self._prefilled: list[Sequence] = []
        """Sequences whose prefill ends with that batch."""
        self._ending: list[Sequence] = []
        """Sequences that decode their last token in that batch."""

    @property
    def num_running(self) -> int:
        return len(self._sequences) - len(self._queue)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_used_blocks(self) -> int:
        return self._cache.pool.num_used

    def add(self, request: Request, output: PackedTokens, now: float) -> None:
        """Queue a request that will generate `output`: packed token ids, at least 1. O(prompt + output).

        A real engine does not know its output beforehand. Here it decides only when the request ends.

        Raises: PromptTooLong: prompt and output can never fit into the cache together. RequestError: one of them is
        empty. UnknownRequest: a request of this id has not ended.
        """
        if request.request_id in self._sequences:
            raise UnknownRequest(f"request {request.request_id!r} was added before and has not ended")
        num_prompt, num_output = request.num_prompt_tokens, len(output) // TOKEN_BYTES
        if not num_prompt or not num_output:
            raise RequestError(f"need at least 1 prompt and 1 output token, got {num_prompt} and {num_output}")
        # The last token is never computed: nothing follows it.
        if self._blocks_for(num_prompt + num_output - 1) > self.num_blocks:
            raise PromptTooLong(
                f"{num_prompt} prompt and {num_output} output tokens do not fit into a KV cache of "
                f"{self.num_blocks * self.block_size} tokens; shorten the prompt or max_tokens"
            )
        self._sequences[request.request_id] = Sequence(request, output, self.block_size, now)
        self._queue.add(request.request_id, num_prompt)

    def abort(self, request_id: str) -> bool:
        """End a request at once and free its blocks. False if it is unknown; it may have ended just now."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        if not sequence.runs:
            self._queue.remove(request_id)
        elif sequence is self._prefilling:
            self._prefilling = None
        else:
            self._decoding.leave(sequence)
        self._release(sequence)
        return True

    def load(self, request: Request, kept: Container[int]) -> list[int]:
        """Put blocks of a prompt that are `kept` elsewhere into the prefix cache, behind those that it has.

        Returns their hashes. Stops at the first block that is not kept, and where no block is free. O(prompt).
        """
        cache = self._cache
        hashes = hash_blocks(request.prompt, self.block_size, namespace=request.namespace)
        start = cache.match(hashes)
        found = list(takewhile(kept.__contains__, hashes[start:]))
        if not found:
            return []  # what is not loaded must not make its prefix look used
        prefix = cache.lock(hashes[:start])
        found = found[: cache.pool.num_free]
        blocks, stop = prefix + cache.allocate(len(found)), start + len(found)
        if found:
            block_bytes = self.block_size * TOKEN_BYTES
            tokens = PackedTokens(request.prompt[start * block_bytes : stop * block_bytes])
            cache.insert(blocks, hashes, start, stop, tokens, request.namespace)
        cache.release(blocks)
        return found

    def lend(self, request: Request) -> Lent:
        """Lock the blocks of a prompt that are in the prefix cache, to be copied, until `take_back`. O(prompt)."""
        hashes = hash_blocks(request.prompt, self.block_size, namespace=request.namespace)
        prefix = hashes[: self._cache.match(hashes)]
        lent = Lent(frozenset(prefix), self._cache.lock(prefix))
        self._lent.append(lent)
        return lent

    def take_back(self, lent: Lent) -> None:
        """Unlock what was lent. Call it once."""
        self._lent = [other for other in self._lent if other is not lent]
        self._cache.release(lent.blocks)

    def reset_cache(self) -> bool:
        """Forget every cached prefix, if no sequence runs and nothing is lent; otherwise change nothing and return
        False.
        """
        return self._cache.clear()

    def take_events(self) -> list[KvEvent]:
        """Return changes of the prefix cache since the last call, in order."""
        return self._cache.take_events()

    def cached_hashes(self) -> frozenset[int]:
        """Return every block in the prefix cache now. O(blocks)."""
        return frozenset(self._cache)

    def next_batch(self, now: float) -> Batch | None:
        """Return what to compute next; None if nothing runs or waits. O(running + admitted).

        Blocks that this iteration fills are in the prefix cache from now on, as in vLLM: a request that is admitted
        later in the same batch reads what an earlier one writes.

        Raises: RuntimeError: the last batch has not been completed.
        """
        if self._batch is not None:
            raise RuntimeError("next_batch was called before the last batch was completed")
        if not self._sequences:
            return None
        preempted: list[RequestId] = []
        context_tokens = self._schedule_decodes(preempted)
        decodes = self._decoding.ids
        prefills: list[PrefillChunk] = []
        budget = self._max_batch_tokens - len(decodes)
        if self._prefilling is not None:
            budget -= self._schedule_chunk(self._prefilling, budget, prefills)
        num_admitted = 0 if preempted else self._admit(budget, prefills, now)
        self._batch = Batch(decodes, context_tokens, tuple(prefills), tuple(preempted), num_admitted)
        return self._batch

    def complete(self, batch: Batch, now: float) -> StepResult:
        """End the iteration: each decode and each finished prefill has its token. O(prefills + requests that end).

        Requests that were aborted since `next_batch` get none. Raises: RuntimeError: `batch` is not the last one, or
        has been completed before.
        """
        if batch is not self._batch:
            raise RuntimeError("complete was called without the last batch, or twice")
        self._batch = None
        decoded = self._decoding.ids
        finished = [self._finish(sequence, now) for sequence in self._ending if sequence.runs]
        prefilled: list[RequestId] = []
        for sequence in self._prefilled:
            if not sequence.runs:
                continue
            prefilled.append(sequence.request.request_id)
            sequence.end_prefill(now)
            if sequence.num_tokens == sequence.final_tokens:
                finished.append(self._finish(sequence, now))
            else:
                self._decoding.join(sequence)
        self._ending, self._prefilled = [], []
        self.stats.generated_tokens += len(decoded) + len(prefilled)
        return StepResult(decoded, tuple(prefilled), tuple(finished))

    def check(self) -> None:
        """Assert every invariant of this replica. O(everything); tests only."""
        self._cache.check()
        self._decoding.check(self._ending)
        runs = [sequence.blocks for sequence in self._sequences.values()]
        self._cache.pool.check([*runs, *(lent.blocks for lent in self._lent)])
        waiting = set(self._queue)
        assert len(waiting) == len(self._queue) <= len(self._sequences)
        for request_id, sequence in self._sequences.items():
            assert sequence.runs == (request_id not in waiting), "a request both runs and waits, or neither"
            assert sequence.runs or not sequence.blocks, "a waiting request holds blocks"
            assert sequence.num_slots == len(sequence.blocks) * self.block_size
            assert sequence.num_computed <= min(sequence.num_slots, sequence.num_tokens)
            for block_hash in sequence.hashes[: sequence.num_inserted]:
                assert block_hash in self._cache, "a block in use was evicted"

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _match(self, sequence: Sequence) -> int:
        """Return leading blocks found in the cache; the last token is always computed, since its output is needed."""
        sequence.last_match = self._cache.match(sequence.hashes, sequence.last_match)
        return min(max(sequence.last_match - self._num_dropped, 0), (sequence.num_tokens - 1) // self.block_size)

    def _cached_tokens_of(self, request_id: str) -> int:
        return self._match(self._sequences[request_id]) * self.block_size

    def _schedule_decodes(self, preempted: list[RequestId]) -> int:
        """Give each decoding sequence room for one token, the oldest first; returns their context in tokens."""
        # A preempted sequence is the newest, so the loop has not visited it yet.
        for sequence in self._decoding.due():
            if sequence.num_computed == sequence.num_slots and not self._grow(sequence, preempted):
                break
            sequence.num_computed += 1
            self._insert_full_blocks(sequence)
            if sequence.num_computed == sequence.final_tokens - 1:
                self._ending.append(sequence)
            else:
                self._decoding.plan_next(sequence)
        return self._decoding.step()

    def _grow(self, sequence: Sequence, preempted: list[RequestId]) -> bool:
        """Get one more block for a decode; while none is free, preempt the newest. False if that is `sequence`."""
        while not self._cache.pool.num_free:
            victim = self._prefilling or self._decoding.newest
            self._preempt(victim)
            preempted.append(victim.request.request_id)
            if victim is sequence:
                return False
        sequence.blocks += self._cache.allocate(1)
        sequence.num_slots += self.block_size
        return True

    def _preempt(self, sequence: Sequence) -> None:
        if sequence is self._prefilling:
            self._prefilling = None
        else:
            self._decoding.leave(sequence)
        self._release(sequence)
        sequence.num_preemptions += 1
        self.stats.preemptions += 1
        self._queue.put_back(sequence.request.request_id)

    def _admit(self, budget: int, prefills: list[PrefillChunk], now: float) -> int:
        """Start waiting requests in the queue's order while budget, places and blocks last; returns the number of new
        ones.
        """
        if budget <= 0 or self._prefilling is not None or not self._queue:
            return 0
        num_new = 0
        places = self._max_running - self.num_running
        if places > 0:
            self._queue.refresh()
        while budget > 0 and places > 0 and (request_id := self._queue.peek()) is not None:
            sequence = self._sequences[request_id]
            if not self._start(sequence, now):
                break
            self._queue.pop()
            places -= 1
            num_new += not sequence.num_preemptions
            budget -= self._schedule_chunk(sequence, budget, prefills)
        return num_new

    def _start(self, sequence: Sequence, now: float) -> bool:
        """Take blocks for all tokens of a waiting request, cached ones first; False if too few are free."""
        num_matched = self._match(sequence)
        prefix = sequence.hashes[:num_matched]
        num_new = self._blocks_for(sequence.num_tokens) - num_matched
        if not self._cache.can_hold(num_new, prefix):
            return False
        if not sequence.num_preemptions:
            self.stats.prefix_queries += sequence.num_tokens
            self.stats.prefix_hits += num_matched * self.block_size
        sequence.start(self._cache.lock(prefix) + self._cache.allocate(num_new), num_matched, now)
        return True

    def _schedule_chunk(self, sequence: Sequence, budget: int, prefills: list[PrefillChunk]) -> int:
        """Schedule as many prompt tokens as the budget allows; returns their number. The last chunk yields a token."""
        num_new = min(budget, sequence.num_tokens - sequence.num_computed)
        if num_new <= 0:
            return 0
        prefills.append(PrefillChunk(sequence.request.request_id, num_new, sequence.num_computed))
        sequence.num_computed += num_new
        self._insert_full_blocks(sequence)
        if sequence.num_computed == sequence.num_tokens:
            self._prefilling = None
            self._prefilled.append(sequence)
        else:
            self._prefilling = sequence
        return num_new

    def _insert_full_blocks(self, sequence: Sequence) -> None:
        """Put newly filled blocks into the prefix cache."""
        start, stop = sequence.num_inserted, sequence.num_computed // self.block_size
        if start == stop:
            return
        tokens = sequence.packed_blocks(start, stop)
        self._cache.insert(sequence.blocks, sequence.hashes, start, stop, tokens, sequence.request.namespace)
        sequence.num_inserted = stop

    def _finish(self, sequence: Sequence, now: float) -> Finished:
        del self._sequences[sequence.request.request_id]
        self._decoding.leave(sequence)
        finished = sequence.finished(now)
        self._release(sequence)
        return finished

    def _release(self, sequence: Sequence) -> None:
        self._cache.release(sequence.blocks)
        sequence.forget_blocks()
