"""LocalScheduler: what goes into a batch, preemption, prefix hits, ends. Literal in, literal out."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from preble.core.replica.scheduler import Batch, LocalScheduler, PrefillChunk, StepResult
from preble.core.replica.waiting_queue import QueueOrder
from preble.core.types import BlocksStored, CacheCleared, PackedTokens, ReplicaId, Request, RequestId, pack_tokens
from preble.errors import PromptTooLong, RequestError, UnknownRequest

OUTPUT = 1000


def answer(output_tokens: int) -> PackedTokens:
    return pack_tokens(range(OUTPUT, OUTPUT + output_tokens))


def scheduler(**changes: Any) -> LocalScheduler:
    values: dict[str, Any] = {
        "replica_id": ReplicaId("r"),
        "num_blocks": 100,
        "block_size": 4,
        "max_batch_tokens": 16,
        "max_running": 8,
    }
    return LocalScheduler(**(values | changes))


def add(local: LocalScheduler, name: str, token_ids: range, output_tokens: int = 1) -> None:
    local.add(Request.of(name, token_ids), answer(output_tokens), 0.0)


def step(local: LocalScheduler) -> tuple[Batch, StepResult]:
    batch = local.next_batch(0.0)
    assert batch is not None
    return batch, local.complete(batch, 1.0)


def run_to_end(local: LocalScheduler) -> list[str]:
    """Run until nothing is left; request ids in the order of their ends."""
    ended: list[str] = []
    while (batch := local.next_batch(0.0)) is not None:
        ended += [finished.request_id for finished in local.complete(batch, 1.0).finished]
    return ended


def test_an_idle_replica_has_no_batch() -> None:
    assert scheduler().next_batch(0.0) is None


def test_a_prompt_gives_its_first_token_with_its_last_chunk() -> None:
    local = scheduler(max_batch_tokens=10)
    add(local, "a", range(25), 2)
    assert step(local) == (Batch((), 0, (PrefillChunk("a", 10, 0),), (), 1), StepResult((), (), ()))
    assert step(local)[0].prefills == (PrefillChunk("a", 10, 10),)
    batch, result = step(local)
    assert batch.prefills == (PrefillChunk("a", 5, 20),)
    assert result == StepResult((), ("a",), ())


def test_decodes_come_first_and_prefill_has_the_rest_of_the_budget() -> None:
    local = scheduler(max_batch_tokens=10)
    add(local, "a", range(4), 9)
    step(local)
    add(local, "b", range(50, 80))
    batch, _ = step(local)
    assert batch == Batch(("a",), 4, (PrefillChunk("b", 9, 0),), (), 1)
    assert batch.num_tokens == 10


def test_several_short_prompts_share_a_batch() -> None:
    local = scheduler(max_batch_tokens=16)
    for i in range(3):
        add(local, f"r{i}", range(10 * i, 10 * i + 6))
    batch, result = step(local)
    assert batch.prefills == (PrefillChunk("r0", 6, 0), PrefillChunk("r1", 6, 0), PrefillChunk("r2", 4, 0))
    assert result.prefilled == ("r0", "r1")


def test_no_more_run_than_max_running() -> None:
    local = scheduler(max_running=2)
    for i in range(3):
        add(local, f"r{i}", range(10 * i, 10 * i + 2), 5)
    step(local)
    assert (local.num_running, local.num_waiting) == (2, 1)


def test_the_context_of_decodes_grows_by_one_a_step() -> None:
    local = scheduler()
    add(local, "a", range(6), 4)
    add(local, "b", range(50, 53), 4)
    step(local)
    assert [step(local)[0].decode_context_tokens for _ in range(3)] == [9, 11, 13]


def test_a_request_ends_with_its_last_token_and_frees_its_blocks() -> None:
    local = scheduler()
    local.add(Request.of("a", range(6)), answer(3), 10.0)
    results = []
    for now in (11.0, 12.0, 13.0):
        batch = local.next_batch(now)
        assert batch is not None
        results.append(local.complete(batch, now + 0.5))
    assert [result.prefilled for result in results] == [("a",), (), ()]
    assert [result.decoded for result in results] == [(), ("a",), ("a",)]
    (finished,) = results[-1].finished
    assert (finished.num_prompt_tokens, finished.num_output_tokens, finished.num_cached_tokens) == (6, 3, 0)
    assert (finished.arrived_at, finished.started_at, finished.first_token_at, finished.finished_at) == (
        10.0,
        11.0,
        11.5,
        13.5,
    )
    assert local.num_used_blocks == 0
    assert local.next_batch(14.0) is None


def test_the_same_prompt_again_computes_only_what_full_blocks_do_not_cover() -> None:
    local = scheduler()
    add(local, "a", range(10))
    run_to_end(local)
    add(local, "b", range(10))
    assert step(local)[0].prefills == (PrefillChunk("b", 2, 8),)
    assert (local.stats.prefix_queries, local.stats.prefix_hits) == (20, 8)


def test_the_last_token_of_a_fully_cached_prompt_is_computed_again() -> None:
    local = scheduler()
    add(local, "a", range(8))
    run_to_end(local)
    add(local, "b", range(8))
    batch, result = step(local)
    assert batch.prefills == (PrefillChunk("b", 4, 4),)
    assert result.finished[0].num_cached_tokens == 4


def test_a_later_prompt_of_the_same_batch_reads_what_an_earlier_one_writes() -> None:
    local = scheduler(max_batch_tokens=100)
    add(local, "a", range(12))
    add(local, "b", range(20))
    assert step(local)[0].prefills == (PrefillChunk("a", 12, 0), PrefillChunk("b", 8, 12))


def test_generated_tokens_are_cached_once_their_block_is_full() -> None:
    local = scheduler()
    add(local, "a", range(6), 7)
    run_to_end(local)
    # The last of the 13 tokens is never computed, so the third block is the last full one.
    follow_up = [*range(6), *range(OUTPUT, OUTPUT + 7), 5, 5, 5]
    local.add(Request.of("b", follow_up), answer(1), 0.0)
    assert step(local)[0].prefills == (PrefillChunk("b", 4, 12),)


def test_blocks_of_decodes_are_reported_with_their_tokens() -> None:
    local = scheduler()
    add(local, "a", range(6), 3)
    run_to_end(local)
    first, second = local.take_events()
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert (first.tokens, first.parent) == (pack_tokens(range(4)), None)
    assert (second.tokens, second.parent) == (pack_tokens([4, 5, OUTPUT, OUTPUT + 1]), first.block_hashes[0])


def test_namespaces_do_not_share() -> None:
    local = scheduler()
    add(local, "a", range(8))
    run_to_end(local)
    request = Request.of("b", range(8))
    local.add(Request(request.request_id, request.prompt, namespace="adapter"), answer(1), 0.0)
    assert step(local)[0].prefills == (PrefillChunk("b", 8, 0),)


def test_when_blocks_run_out_the_newest_is_preempted_and_served_first_afterwards() -> None:
    local = scheduler(num_blocks=5)
    add(local, "old", range(8), 9)
    add(local, "new", range(20, 28), 9)
    add(local, "waiting", range(40, 44), 1)
    step(local)
    assert (local.num_running, local.num_waiting) == (2, 1)
    batch, _ = step(local)
    assert batch.preempted == ("new",)
    assert batch.decodes == ("old",)
    assert batch.prefills == (), "nobody is admitted in the step of a preemption"
    assert local.stats.preemptions == 1
    admitted: list[str] = []
    while (batch := local.next_batch(0.0)) is not None:
        admitted += [chunk.request_id for chunk in batch.prefills]
        local.complete(batch, 1.0)
    assert admitted == ["new", "waiting"]


def test_a_prompt_is_admitted_only_when_all_its_blocks_are_free() -> None:
    local = scheduler(num_blocks=6, max_batch_tokens=9)
    add(local, "a", range(4), 9)
    add(local, "b", range(20, 24), 9)
    step(local)
    add(local, "long", range(40, 54), 1)
    assert step(local)[0].prefills == (), "four blocks are needed and two are free"
    local.abort("b")
    assert step(local)[0].prefills == (PrefillChunk("long", 8, 0),)


def test_nobody_is_admitted_while_a_prompt_is_in_prefill() -> None:
    local = scheduler(max_batch_tokens=8)
    add(local, "long", range(12), 1)
    add(local, "next", range(40, 44), 1)
    assert step(local)[0].prefills == (PrefillChunk("long", 8, 0),)
    assert step(local)[0].prefills == (PrefillChunk("long", 4, 8), PrefillChunk("next", 4, 0))


def test_the_prompt_in_prefill_is_preempted_before_a_decode() -> None:
    local = scheduler(num_blocks=6, max_batch_tokens=4, max_running=2)
    add(local, "decode", range(4), 9)
    step(local)
    add(local, "long", range(40, 56), 1)
    batches = [step(local)[0] for _ in range(4)]
    assert batches[0].prefills == (PrefillChunk("long", 3, 0),)
    assert [batch.preempted for batch in batches] == [(), (), (), ()]
    assert step(local)[0].preempted == ("long",)
    assert run_to_end(local) == ["decode", "long"]


def test_preemption_does_not_change_how_much_is_generated_nor_the_hits_that_are_counted() -> None:
    local = scheduler(num_blocks=5)
    add(local, "old", range(8), 9)
    add(local, "new", range(20, 28), 9)
    num_tokens = preemptions = 0
    while (batch := local.next_batch(0.0)) is not None:
        result = local.complete(batch, 1.0)
        num_tokens += (*result.decoded, *result.prefilled).count(RequestId("new"))
        preemptions += sum(finished.num_preemptions for finished in result.finished)
    assert num_tokens == 9
    assert preemptions == local.stats.preemptions == 1
    assert local.stats.prefix_queries == 16
    assert local.stats.generated_tokens == 18


def test_abort_frees_a_running_request_at_once() -> None:
    local = scheduler()
    add(local, "a", range(8), 100)
    step(local)
    assert local.abort("a")
    assert (local.num_running, local.num_used_blocks) == (0, 0)
    assert local.next_batch(0.0) is None


def test_abort_of_a_waiting_request_leaves_the_others() -> None:
    local = scheduler(max_running=1)
    add(local, "a", range(4), 3)
    add(local, "b", range(4, 8))
    add(local, "c", range(8, 12))
    step(local)
    assert local.abort("b")
    assert run_to_end(local) == ["a", "c"]


@pytest.mark.parametrize("prompt_tokens", [4, 40])
def test_a_request_aborted_during_its_iteration_gets_no_token(prompt_tokens: int) -> None:
    local = scheduler()
    add(local, "a", range(prompt_tokens), 5)
    batch = local.next_batch(0.0)
    assert batch is not None
    local.abort("a")
    assert local.complete(batch, 1.0) == StepResult((), (), ())
    assert local.num_used_blocks == 0
    assert local.next_batch(0.0) is None


def test_an_id_can_be_used_again_while_the_iteration_of_its_aborted_owner_runs() -> None:
    local = scheduler()
    add(local, "a", range(4), 5)
    batch = local.next_batch(0.0)
    assert batch is not None
    local.abort("a")
    add(local, "a", range(50, 54), 1)
    assert local.complete(batch, 1.0) == StepResult((), (), ())
    assert run_to_end(local) == ["a"]


def test_abort_of_an_unknown_request_says_so() -> None:
    assert not scheduler().abort("ghost")


def test_the_cache_is_reset_only_while_nothing_runs() -> None:
    local = scheduler()
    add(local, "a", range(8), 2)
    step(local)
    assert not local.reset_cache()
    run_to_end(local)
    local.take_events()
    assert local.reset_cache()
    assert local.take_events() == [CacheCleared(ReplicaId("r"))]
    assert local.cached_hashes() == frozenset()


def test_groups_admit_the_hit_before_the_older_miss() -> None:
    local = scheduler(order=QueueOrder.GROUPS, max_running=1)
    add(local, "seed", range(12))
    run_to_end(local)
    add(local, "miss", range(50, 62))
    add(local, "hit", range(16))
    assert run_to_end(local) == ["hit", "miss"]


def test_the_hit_ratio_that_counts_is_the_current_one() -> None:
    local = scheduler(order=QueueOrder.GROUPS, max_running=1, max_batch_tokens=100)
    add(local, "blocker", range(40, 60), 3)
    step(local)
    add(local, "miss", range(80, 100))
    add(local, "hit", range(40, 60))
    assert run_to_end(local) == ["blocker", "hit", "miss"]


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    local = scheduler(num_blocks=3)
    add(local, "fits", range(10), 3)
    with pytest.raises(PromptTooLong, match="10 prompt and 4 output tokens do not fit into a KV cache of 12 tokens"):
        add(local, "too long", range(10), 4)
    assert run_to_end(local) == ["fits"]


@pytest.mark.parametrize(("prompt_tokens", "output_tokens"), [(0, 1), (1, 0)])
def test_an_empty_prompt_or_output_is_refused(prompt_tokens: int, output_tokens: int) -> None:
    with pytest.raises(RequestError, match="at least 1"):
        add(scheduler(), "a", range(prompt_tokens), output_tokens)


def test_two_requests_cannot_have_one_id() -> None:
    local = scheduler()
    add(local, "a", range(4))
    with pytest.raises(UnknownRequest, match="'a' was added before"):
        add(local, "a", range(4))


def test_batch_and_completion_alternate() -> None:
    local = scheduler()
    add(local, "a", range(4))
    batch = local.next_batch(0.0)
    assert batch is not None
    with pytest.raises(RuntimeError, match="before the last batch was completed"):
        local.next_batch(0.0)
    local.complete(batch, 0.0)
    with pytest.raises(RuntimeError, match="without the last batch"):
        local.complete(batch, 0.0)


def test_every_decode_must_fit_into_a_batch() -> None:
    with pytest.raises(ValueError, match="max_running <= max_batch_tokens"):
        scheduler(max_running=17)


def test_steps_that_only_count_cost_the_same_for_few_decodes_and_for_many() -> None:
    """In calls and not in time: no decode is looked at until it needs a block, fills one or ends."""
    few, many = (_calls_of_steps(num_decodes) for num_decodes in (2, 200))
    assert few == many


def _calls_of_steps(num_decodes: int) -> int:
    """Function calls that ten steps make in which no block is begun or filled, and nothing ends."""
    local = scheduler(num_blocks=10_000, max_batch_tokens=90_000, max_running=300, block_size=16)
    for i in range(num_decodes):
        add(local, f"r{i}", range(i * 400, i * 400 + 402), 100)
    step(local)
    step(local)
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for _ in range(10):
            assert len(step(local)[0].decodes) == num_decodes
    finally:
        sys.setprofile(None)
    return calls


def test_what_is_lent_stays_until_it_is_taken_back() -> None:
    local = scheduler(num_blocks=4)
    add(local, "a", range(9))
    run_to_end(local)
    lent = local.lend(Request.of("copy", range(9)))
    local.check()
    assert len(lent.hashes) == 2 and lent.hashes <= local.cached_hashes()
    assert not local.reset_cache()
    add(local, "b", range(500, 508))
    run_to_end(local)
    assert lent.hashes <= local.cached_hashes()
    local.take_back(lent)
    local.check()
    assert local.reset_cache()


def test_what_one_replica_lends_another_loads() -> None:
    source, target = scheduler(), scheduler()
    add(source, "a", range(9))
    run_to_end(source)
    asked = Request.of("b", [*range(8), 99])
    lent = source.lend(asked)
    assert set(target.load(asked, lent.hashes)) == lent.hashes
    source.take_back(lent)
    target.add(asked, answer(1), 0.0)
    assert step(target)[0].prefills == (PrefillChunk(RequestId("b"), 1, 8),)
