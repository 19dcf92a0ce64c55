"""LocalScheduler under any sequence of arrivals, aborts and resets: blocks conserved, each request ends once."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from preble.core.replica.prefix_cache import hash_blocks
from preble.core.replica.scheduler import Batch, LocalScheduler
from preble.core.replica.waiting_queue import QueueOrder
from preble.core.types import (
    TOKEN_BYTES,
    BlocksEvicted,
    BlocksStored,
    CacheCleared,
    KvEvent,
    PackedTokens,
    ReplicaId,
    Request,
    RequestId,
    pack_tokens,
)

BLOCK = 2
NUM_BLOCKS = 12
MAX_BATCH_TOKENS = 6
MAX_RUNNING = 3
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=16)


class CacheAsReported:
    """What a listener to the events believes to be cached: hash -> (parent, the tokens of its block)."""

    def __init__(self) -> None:
        self.blocks: dict[int | bytes, tuple[int | bytes | None, bytes]] = {}

    def feed(self, events: list[KvEvent]) -> None:
        for event in events:
            match event:
                case BlocksStored():
                    self.store(event)
                case BlocksEvicted():
                    for block_hash in event.block_hashes:
                        assert block_hash in self.blocks, "an unknown block was evicted"
                        children = [h for h, (parent, _) in self.blocks.items() if parent == block_hash]
                        assert not children, "a block was evicted before the block that follows it"
                        del self.blocks[block_hash]
                case CacheCleared():
                    self.blocks.clear()

    def store(self, event: BlocksStored) -> None:
        assert event.parent is None or event.parent in self.blocks, "a block was stored without its parent"
        assert len(event.tokens) == len(event.block_hashes) * event.block_size * TOKEN_BYTES
        parent = event.parent
        for i, block_hash in enumerate(event.block_hashes):
            step = event.block_size * TOKEN_BYTES
            tokens = event.tokens[i * step : (i + 1) * step]
            assert block_hash not in self.blocks, "a block was stored twice"
            assert [block_hash] == hash_blocks(tokens, BLOCK, parent if isinstance(parent, int) else None)
            self.blocks[block_hash] = (parent, tokens)
            parent = block_hash


def answer(prompt: PackedTokens, num_tokens: int) -> PackedTokens:
    return pack_tokens((len(prompt) + position) % 2 for position in range(num_tokens))


class LocalSchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.targets: dict[RequestId, int] = {}
        """Requests that have not ended, and the output that each is owed."""
        self.outputs: Counter[RequestId] = Counter()
        self.batch: Batch | None = None
        self.listener = CacheAsReported()
        self.now = 0.0
        self.count = 0

    @initialize(order=st.sampled_from(QueueOrder))
    def start(self, order: QueueOrder) -> None:
        self.scheduler = LocalScheduler(
            replica_id=ReplicaId("r"),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK,
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_running=MAX_RUNNING,
            order=order,
            num_groups=3,
        )

    @rule(token_ids=PROMPTS, output_tokens=st.integers(1, 9))
    def add(self, token_ids: list[int], output_tokens: int) -> None:
        self.count += 1
        request = Request(RequestId(f"r{self.count}"), pack_tokens(token_ids))
        self.scheduler.add(request, answer(request.prompt, output_tokens), self.now)
        self.targets[request.request_id] = output_tokens

    @precondition(lambda self: self.targets)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.targets)))
        assert self.scheduler.abort(request_id)
        assert not self.scheduler.abort(request_id), "aborted twice"
        del self.targets[request_id]

    @precondition(lambda self: self.batch is None)
    @rule()
    def next_batch(self) -> None:
        self.batch = self.scheduler.next_batch(self.now)
        assert (self.batch is None) == (not self.targets), "there is work exactly while a request has not ended"
        if self.batch is None:
            return
        assert 0 < self.batch.num_tokens <= MAX_BATCH_TOKENS
        assert self.scheduler.num_running <= MAX_RUNNING
        ids = [*self.batch.decodes, *(chunk.request_id for chunk in self.batch.prefills)]
        assert len(set(ids)) == len(ids), "a request is twice in a batch"
        assert not set(ids) & set(self.batch.preempted), "a preempted request is in the batch"

    @precondition(lambda self: self.batch is not None)
    @rule()
    def complete(self) -> None:
        assert self.batch is not None
        self.now += 1.0
        in_batch = {*self.batch.decodes, *(chunk.request_id for chunk in self.batch.prefills)}
        result = self.scheduler.complete(self.batch, self.now)
        self.batch = None
        with_token = (*result.decoded, *result.prefilled)
        assert set(with_token) <= in_batch
        self.outputs.update(with_token)
        for finished in result.finished:
            target = self.targets.pop(finished.request_id)
            assert self.outputs[finished.request_id] == target == finished.num_output_tokens
            assert finished.arrived_at <= finished.started_at < finished.first_token_at <= finished.finished_at
            assert finished.num_cached_tokens < finished.num_prompt_tokens
        assert all(self.outputs[request_id] < target for request_id, target in self.targets.items())

    @rule()
    def reset_cache(self) -> None:
        assert self.scheduler.reset_cache() == (self.scheduler.num_used_blocks == 0)

    @invariant()
    def invariants_hold(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.targets)

    @invariant()
    def events_say_what_is_cached(self) -> None:
        if hasattr(self, "scheduler"):
            self.listener.feed(self.scheduler.take_events())
            assert set(self.listener.blocks) == set(self.scheduler.cached_hashes())

    def teardown(self) -> None:
        """Whatever happened, everything that has not ended ends, and nothing stays in use."""
        if not hasattr(self, "scheduler"):
            return
        if self.batch is not None:
            self.complete()
        for _ in range(2000):
            self.next_batch()
            if self.batch is None:
                break
            self.complete()
        assert not self.targets, "requests did not end"
        assert self.scheduler.num_used_blocks == 0


TestLocalScheduler = LocalSchedulerMachine.TestCase
TestLocalScheduler.settings = settings(stateful_step_count=60, max_examples=60, deadline=None)
