"""What is over leaves nothing behind in the prefix index, however it ended and whatever clients sent."""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict
from dataclasses import replace
from random import Random

import pytest

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.prefixes.cache_entry import COPIED_BYTES
from preble.core.prefixes.radix_tree import RadixTree
from preble.core.types import (
    BlockHash,
    BlocksEvicted,
    BlocksStored,
    CacheCleared,
    ReplicaId,
    Request,
    RequestId,
    namespace_of,
    pack_tokens,
)
from support.by_hand import A, B, run_of, scheduler_of

pytestmark = pytest.mark.slow

BLOCK = 4


def scheduler(*replica_ids: ReplicaId) -> GlobalScheduler:
    return scheduler_of("round_robin", *replica_ids, block_size=BLOCK, reports_events=True)


def store_first_block(made: GlobalScheduler, replica_id: ReplicaId, prompt: list[int]) -> None:
    made.on_stored(BlocksStored(replica_id, (1,), None, pack_tokens(prompt[:BLOCK]), BLOCK), 0.0)


def test_of_an_aborted_prompt_only_what_was_stored_stays() -> None:
    """Chunked prefill: the first block is stored, then the client leaves."""
    made, prompt = scheduler(A), run_of(1, 10_000)
    made.place(Request.of("aborted", prompt), 0.0)
    store_first_block(made, A, prompt)
    made.on_finish(RequestId("aborted"), 0, 0.1)
    made.check()
    assert made.snapshot().num_index_tokens == BLOCK


def test_where_a_request_was_moved_from_only_what_was_stored_stays() -> None:
    made, prompt = scheduler(A, B), run_of(1, 10_000)
    assert made.place(Request.of("moved", prompt), 0.0).replica_id == A
    store_first_block(made, A, prompt)
    made.move(RequestId("moved"), B, 0.1)
    made.on_finish(RequestId("moved"), 0, 0.2)
    made.check()
    assert made.snapshot().num_index_tokens == BLOCK


def test_what_the_index_forgets_is_freed_without_the_garbage_collector() -> None:
    """A serving process runs full collections hardly ever: the entries of a million prompts would stay."""
    made = scheduler(A, B)
    gc.collect()
    gc.disable()
    try:
        for number in range(200):
            name = f"request {number}"
            prompt = run_of(number, 2 * BLOCK)
            replica_id = made.place(Request.of(name, prompt), float(number)).replica_id
            made.on_first_token(RequestId(name), float(number))
            made.on_finish(RequestId(name), 0, float(number))
            made.on_stored(BlocksStored(replica_id, (number,), None, pack_tokens(prompt[:BLOCK]), BLOCK), float(number))
            made.on_evicted(BlocksEvicted(replica_id, (number,)), float(number))
            made.on_timer(float(number))
        made.on_timer(1e6)
        assert made.snapshot().num_index_tokens == 0
        assert gc.collect() < 20
        for number in range(200):
            event = BlocksStored(A, (number,), None, pack_tokens(run_of(number, BLOCK)), BLOCK)
            made.on_stored(event, 1e6)
        made.remove_replica(A, 1e6)
        assert made.snapshot().num_index_tokens == 0
        assert gc.collect() < 20
    finally:
        gc.enable()


def test_a_namespace_is_gone_with_its_last_prompt() -> None:
    tree, prompt = RadixTree(), pack_tokens([1, 2, 3])
    assert tree.match(prompt, "asked for").num_tokens == 0
    tree.check()
    [leaf] = tree.insert(prompt, "salted")
    assert (tree.num_nodes, tree.match(prompt, "salted").num_tokens) == (2, 3), (
        "its root counts, so that it is paid for"
    )
    tree.remove(leaf)
    tree.check()
    assert (tree.num_nodes, tree.match(prompt, "salted").num_tokens) == (0, 0)


def test_requests_that_each_have_a_salt_of_their_own_leave_nothing_behind() -> None:
    made = scheduler(A)
    for i in range(100):
        request = replace(Request.of(f"q{i}", run_of(i, 8)), namespace=namespace_of(cache_salt=f"salt {i}"))
        made.place(request, 0.0)
        made.on_finish(request.request_id, 1, 0.0)
    made.on_timer(1e6)
    made.check()
    assert made.snapshot().num_index_bytes == 0


@pytest.mark.parametrize("length", [1, 63, 64, 1_000_000])
def test_a_namespace_is_short_however_long_the_salt(length: int) -> None:
    names = {namespace_of(lora, salt) for lora in (None, "sql") for salt in ("a" * length, "a" * length + "b")}
    assert len(names) == 4 and max(map(len, names)) <= 64


def stored(
    replica_id: ReplicaId, name: int, tokens: list[int], block_size: int, parent: int | None = None
) -> BlocksStored:
    """The blocks of `tokens`, named from `name` on."""
    names = tuple(range(name, name + len(tokens) // block_size))
    return BlocksStored(replica_id, names, parent, pack_tokens(tokens), block_size)


@pytest.mark.parametrize(("block_size", "most"), [(16, 1.3), (1, 2.1)])
def test_an_index_with_kv_events_takes_little_more_than_its_tokens(block_size: int, most: float) -> None:
    made = scheduler_of("preble", A, block_size=block_size, reports_events=True)
    for i in range(50):
        assert made.on_stored(stored(A, i * 10_000, run_of(i, 1600), block_size), 0.0)
    state = made.snapshot()
    assert state.num_index_tokens == 50 * 1600
    assert state.num_index_bytes <= most * 4 * state.num_index_tokens


def test_block_names_go_with_what_they_name() -> None:
    """At its budget the index forgets old prompts with their names, so that there is room for new ones."""
    budget = {"index_budget_bytes": 100_000}
    made = scheduler_of("preble", A, settings=budget, block_size=16, reports_events=True)
    for i in range(200):
        assert made.on_stored(stored(A, i * 1000, run_of(i, 800), 16), float(i))
    made.check()
    state = made.snapshot()
    assert state.num_unindexed == 0
    assert state.num_index_tokens * 4 > 0.6 * 100_000
    assert made.matched_tokens(A, Request.of("probe", [*run_of(199, 800), 1])) == 800
    made.on_evicted(CacheCleared(A), 300.0)
    assert made.snapshot().num_index_bytes == 0


def test_a_block_stays_until_its_last_copy_is_gone() -> None:
    """vLLM computes the last block of a prompt again, and announces each copy by itself."""
    made = scheduler_of("e2", A, block_size=16, reports_events=True)
    prompt = run_of(1, 64)
    probe = Request.of("probe", [*prompt, 1])
    made.on_stored(stored(A, 0, prompt, 16), 0.0)
    made.on_stored(stored(A, 2, prompt[32:], 16, parent=1), 0.0)
    made.on_stored(stored(A, 3, prompt[48:], 16, parent=2), 0.0)
    believed = []
    for gone in [(3, 2), (3,), (3, 2), (1, 0)]:
        made.on_evicted(BlocksEvicted(A, gone), 0.0)
        made.check()
        believed.append(made.matched_tokens(A, probe))
    assert believed == [64, 64, 32, 0]
    assert made.snapshot().num_index_bytes == 0


def test_copies_stored_and_removed_in_any_order_are_counted_as_the_engine_has_them() -> None:
    rng, copies = Random(3), Counter[int]()
    made = scheduler_of("e2", A, block_size=16, reports_events=True)
    prompts = [run_of(1, 160) + run_of(i, 160) for i in range(2, 6)]
    named = [[hash(tuple(prompt[:end])) for end in range(16, 321, 16)] for prompt in prompts]

    def num_held(names: list[int]) -> int:
        return next((i for i, name in enumerate(names) if not copies[name]), len(names))

    for _ in range(600):
        at = rng.randrange(len(prompts))
        names, held = named[at], num_held(named[at])
        if rng.random() < 0.4:
            start = rng.randrange(min(held + 1, len(names)))
            end = rng.randrange(start, len(names)) + 1
            copies.update(names[start:end])
            tokens = pack_tokens(prompts[at][16 * start : 16 * end])
            made.on_stored(
                BlocksStored(A, tuple(names[start:end]), names[start - 1] if start else None, tokens, 16), 0.0
            )
        elif held and not any(other[held - 1] == names[held - 1] and num_held(other) > held for other in named):
            copies[names[held - 1]] -= 1
            made.on_evicted(BlocksEvicted(A, (names[held - 1],)), 0.0)
        made.check()
        for prompt, blocks in zip(prompts, named, strict=True):
            assert made.matched_tokens(A, Request.of("probe", [*prompt, 1])) == 16 * num_held(blocks)


def test_blocks_are_in_the_namespace_of_their_parent() -> None:
    """vLLM names the cache salt with a prompt's first block only."""
    made, prompt, salt = (
        scheduler_of("e2", A, block_size=16, reports_events=True),
        run_of(1, 32),
        namespace_of(None, "s"),
    )
    made.on_stored(replace(stored(A, 0, prompt[:16], 16), namespace=salt), 0.0)
    made.on_stored(stored(A, 1, prompt[16:], 16, parent=0), 0.0)
    probe = Request.of("probe", [*prompt, 1])
    assert [made.matched_tokens(A, replace(probe, namespace=name)) for name in (salt, "")] == [32, 0]


def test_copies_of_blocks_are_paid_for_and_go_with_a_cleared_cache() -> None:
    made = scheduler_of("e2", A, block_size=16, reports_events=True)
    event = stored(A, 0, run_of(1, 1600), 16)
    made.on_stored(event, 0.0)
    once = made.snapshot().num_index_bytes
    made.on_stored(event, 0.0)
    made.on_stored(event, 0.0)
    assert made.snapshot().num_index_bytes == once + 100 * COPIED_BYTES
    made.on_evicted(CacheCleared(A), 0.0)
    assert made.snapshot().num_index_bytes == 0
    made.on_stored(event, 0.0)
    made.on_evicted(BlocksEvicted(A, event.block_hashes[::-1]), 0.0)
    assert made.snapshot().num_index_bytes == 0


@pytest.mark.parametrize(("spec", "events"), [(16, 64), (64, 16), (16, 48)])
def test_events_of_another_block_size_leave_no_ghosts(spec: int, events: int) -> None:
    made = scheduler_of("e2", A, block_size=spec, reports_events=True)
    for i in range(20):
        event = stored(A, i * 1000, run_of(i, 384), events)
        made.on_stored(event, float(i))
        made.on_evicted(BlocksEvicted(A, event.block_hashes[-1:]), float(i))
        assert made.matched_tokens(A, Request.of("probe", [*run_of(i, 384), 1])) == (384 - events) // spec * spec
        made.on_evicted(BlocksEvicted(A, event.block_hashes[-2::-1]), float(i))
        made.check()
    assert made.snapshot().num_index_bytes == 0


def test_blocks_may_be_evicted_from_the_first_from_the_last_and_from_the_middle() -> None:
    made = scheduler_of("e2", A, block_size=16, reports_events=True)
    prompt = run_of(1, 160)

    def left_after(*names: int) -> int:
        made.on_evicted(CacheCleared(A), 0.0)
        made.on_stored(stored(A, 0, prompt, 16), 0.0)
        made.on_evicted(BlocksEvicted(A, names), 0.0)
        made.check()
        return made.matched_tokens(A, Request.of("probe", [*prompt, 1]))

    assert [left_after(9), left_after(9, 8, 7), left_after(7, 8, 9), left_after(4), left_after(77)] == [
        144,
        112,
        112,
        64,
        160,
    ]


def test_names_follow_a_node_that_is_split_and_joined_again() -> None:
    made = scheduler_of("e2", A, block_size=16, reports_events=True)
    prompt, branch = run_of(1, 160), run_of(2, 64)
    made.on_stored(stored(A, 0, prompt, 16), 0.0)
    assert made.on_stored(stored(A, 50, branch, 16, parent=4), 0.0), "the parent is in the middle of a node"
    assert made.matched_tokens(A, Request.of("probe", [*prompt[:80], *branch, 1])) == 144
    made.on_evicted(BlocksEvicted(A, (53, 52, 51, 50)), 0.0)
    made.check()
    assert made.on_stored(stored(A, 10, run_of(3, 32), 16, parent=9), 0.0)
    made.on_evicted(BlocksEvicted(A, (11, 10, 9, 8)), 0.0)
    made.check()
    assert made.matched_tokens(A, Request.of("probe", [*prompt, 1])) == 128
    made.on_evicted(BlocksEvicted(A, tuple(range(8))), 0.0)
    assert made.snapshot().num_index_bytes == 0


@pytest.mark.parametrize("kind", ["int", "negative", "unsigned", "bytes"])
def test_names_may_be_integers_or_bytes(kind: str) -> None:
    made = scheduler_of("e2", A, block_size=16, reports_events=True)
    names: dict[str, list[BlockHash]] = {
        "int": [7 * 2**40 + i for i in range(10)],
        "negative": [-(2**62) + i for i in range(10)],
        "unsigned": [2**64 - 1 - i for i in range(10)],
        "bytes": [bytes([i]) * 32 for i in range(10)],
    }
    prompt = run_of(1, 160)
    made.on_stored(BlocksStored(A, tuple(names[kind]), None, pack_tokens(prompt), 16), 0.0)
    made.on_evicted(BlocksEvicted(A, tuple(names[kind][:6:-1])), 0.0)
    assert made.matched_tokens(A, Request.of("probe", [*prompt, 1])) == 112


class PageCache:
    """A replica's cache as a set of prefixes, page by page, which says what it stores and evicts.

    `backwards`: it names the last page of a run first, as vLLM does; else the first one, as SGLang does.
    """

    def __init__(self, made: GlobalScheduler, page: int, capacity: int, *, backwards: bool) -> None:
        self.made, self.page, self.capacity, self.backwards = made, page, capacity, backwards
        self.pages: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self.unlocated = 0

    def names(self, prompt: list[int]) -> list[tuple[int, ...]]:
        return [tuple(prompt[:end]) for end in range(self.page, len(prompt) + 1, self.page)]

    def held(self, prompt: list[int]) -> int:
        names = self.names(prompt)
        return self.page * next((i for i, name in enumerate(names) if name not in self.pages), len(names))

    def serve(self, request_id: str, prompt: list[int], now: float) -> None:
        self.made.place(Request.of(request_id, prompt), now)
        held, names = self.held(prompt), self.names(prompt)
        fresh = names[held // self.page :]
        for name in reversed(names):
            self.pages[name] = None
            self.pages.move_to_end(name)
        parent = hash(names[held // self.page - 1]) if held else None
        tokens = pack_tokens(prompt[held : len(names) * self.page])
        event = BlocksStored(A, tuple(map(hash, fresh)), parent, tokens, self.page)
        self.unlocated += bool(fresh) and not self.made.on_stored(event, now)
        self.made.on_finish(RequestId(request_id), 1, now)
        self.evict(max(len(self.pages) - self.capacity // self.page, 0), now)

    def evict(self, count: int, now: float) -> None:
        gone = [hash(self.pages.popitem(last=False)[0]) for _ in range(count)]
        if gone:
            self.made.on_evicted(BlocksEvicted(A, tuple(gone if self.backwards else gone[::-1])), now)


@pytest.mark.parametrize("backwards", [True, False])
@pytest.mark.parametrize("page", [1, 3, 4, 16])
def test_what_small_pages_hold_is_known(page: int, backwards: bool) -> None:
    rng = Random(page)
    no_grace = {"report_grace_s": 0.0}
    made = scheduler_of("round_robin", A, settings=no_grace, block_size=page, reports_events=True)
    cache = PageCache(made, page, 3000, backwards=backwards)
    prompts = [run_of(1, rng.randrange(1, 300)) + run_of(i + 2, rng.randrange(20, 400)) for i in range(60)]
    errors = []
    for step in range(400):
        prompt = rng.choice(prompts)
        cache.serve(str(step), prompt[: rng.randrange(len(prompt) // 2, len(prompt))], float(step))
        made.on_timer(float(step))
        probe = rng.choice(prompts)
        errors.append(made.matched_tokens(A, Request.of("probe", [*probe, 1])) - cache.held(probe))
        if step % 20 == 0:
            made.check()
    assert sum(abs(error) >= 16 for error in errors) <= len(errors) // 50, sorted(errors)
    assert cache.unlocated <= 400 // 50
    cache.evict(len(cache.pages), 1e3)
    made.on_timer(1e6)
    made.check()
    assert made.snapshot().num_index_bytes == 0
