"""What the scheduler learns about caches from `cached_tokens`, and from events whose parent it has never seen."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import BlocksEvicted, BlocksStored, ReplicaId, Request, RequestId, pack_tokens
from support.by_hand import A, B, run_of, scheduler_of

BLOCK = 16
SYSTEM = run_of(1, 10 * BLOCK)


def answer(made: GlobalScheduler, name: str, prompt: Sequence[int], cached: int | None, now: float = 0.0) -> ReplicaId:
    placed = made.place(Request.of(name, prompt), now)
    made.on_finish(RequestId(name), 1, now, cached_tokens=cached)
    return placed.replica_id


def matched(made: GlobalScheduler, prompt: Sequence[int], replica: ReplicaId = A) -> int:
    return made.matched_tokens(replica, Request.of("probe", [*prompt, 0]))


def settle(made: GlobalScheduler, now: float) -> None:
    """After this, only what is known to be cached counts."""
    made.on_timer(now)
    made.check()


# -- a scheduler that starts beside running engines -------------------------------------------------------------------


def test_an_answer_with_more_cached_tokens_than_expected_shows_what_the_replica_holds() -> None:
    made = scheduler_of("e2", A, block_size=BLOCK, reports_events=True)
    answer(made, "q", SYSTEM + run_of(2, 40), cached=len(SYSTEM))
    settle(made, 5.0)
    assert matched(made, SYSTEM + run_of(3, 40)) == len(SYSTEM)
    assert made.snapshot().replicas[A].cached_tokens == len(SYSTEM)


def test_a_reported_loss_ends_what_was_learned_from_answers_but_no_named_block() -> None:
    made = scheduler_of("e2", A, block_size=BLOCK, reports_events=True)
    learned, named = SYSTEM + run_of(2, 4 * BLOCK), SYSTEM + run_of(3, 4 * BLOCK)
    answer(made, "learned", [*learned, 7], cached=len(learned))
    hashes = tuple(range(1, len(named) // BLOCK + 1))
    assert made.on_stored(BlocksStored(A, hashes, None, pack_tokens(named), BLOCK), 0.0)
    settle(made, 5.0)
    assert (matched(made, learned), matched(made, named)) == (len(learned), len(named))
    answer(made, "loss", SYSTEM + run_of(4, 40), cached=0, now=6.0)
    settle(made, 12.0)
    assert (matched(made, learned), matched(made, named)) == (len(SYSTEM), len(named))


def test_an_event_with_an_unknown_parent_is_located_by_the_prompt_just_served() -> None:
    made = scheduler_of("e2", A, block_size=BLOCK, reports_events=True)
    document = SYSTEM + run_of(2, 4 * BLOCK)
    made.place(Request.of("q", [*document, 7]), 0.0)
    event = BlocksStored(A, (11, 12, 13, 14), 10, pack_tokens(document[len(SYSTEM) :]), BLOCK)
    assert made.on_stored(event, 0.0)
    made.on_finish(RequestId("q"), 1, 0.0)
    settle(made, 5.0)
    assert matched(made, document) == len(document)
    made.on_evicted(BlocksEvicted(A, (14,)), 6.0)
    assert matched(made, document) == len(document) - BLOCK
    made.check()


def test_events_that_continue_a_located_one_are_located_too() -> None:
    made = scheduler_of("e2", A, block_size=BLOCK, reports_events=True)
    document = SYSTEM + run_of(2, 2 * BLOCK)
    made.place(Request.of("q", document), 0.0)
    assert made.on_stored(BlocksStored(A, (11, 12), 10, pack_tokens(document[len(SYSTEM) :]), BLOCK), 0.0)
    reply = run_of(9, BLOCK)
    assert made.on_stored(BlocksStored(A, (13,), 12, pack_tokens(reply), BLOCK), 0.0)
    assert made.on_stored(BlocksStored(A, (21,), 10, pack_tokens(run_of(8, BLOCK)), BLOCK), 0.0)
    made.on_finish(RequestId("q"), 1, 0.0)
    settle(made, 5.0)
    assert matched(made, document + reply) == len(document) + BLOCK
    assert matched(made, SYSTEM + run_of(8, BLOCK)) == len(SYSTEM) + BLOCK


@pytest.mark.parametrize("tokens", [run_of(5, 2 * BLOCK), SYSTEM[BLOCK - 1 : 3 * BLOCK - 1], SYSTEM[: 2 * BLOCK]])
def test_an_event_that_no_served_prompt_contains_as_a_block_after_the_first_is_not_located(tokens: list[int]) -> None:
    """Other tokens; tokens of the prompt, but not from where a block begins; its first tokens, which have no parent."""
    made = scheduler_of("e2", A, block_size=BLOCK, reports_events=True)
    made.place(Request.of("q", SYSTEM), 0.0)
    assert not made.on_stored(BlocksStored(A, (11, 12), 10, pack_tokens(tokens), BLOCK), 0.0)
    made.check()


def test_a_prompt_of_another_namespace_locates_nothing() -> None:
    made = scheduler_of("e2", A, block_size=BLOCK, reports_events=True)
    made.place(Request.of("q", SYSTEM), 0.0)
    tokens = pack_tokens(SYSTEM[BLOCK : 2 * BLOCK])
    assert not made.on_stored(BlocksStored(A, (11,), 10, tokens, BLOCK, namespace="other"), 0.0)
    assert made.on_stored(BlocksStored(A, (11,), 10, tokens, BLOCK), 0.0)


def test_a_prompt_served_on_another_replica_locates_nothing() -> None:
    made = scheduler_of("e2", A, B, block_size=BLOCK, reports_events=True)
    where = made.place(Request.of("q", SYSTEM), 0.0).replica_id
    other = B if where == A else A
    assert not made.on_stored(BlocksStored(other, (11,), 10, pack_tokens(SYSTEM[BLOCK : 2 * BLOCK]), BLOCK), 0.0)


# -- replicas without events ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [1, BLOCK])
def test_a_report_that_is_a_block_short_is_no_loss(missing: int) -> None:
    made = scheduler_of("e2", A, block_size=BLOCK)
    for i in range(3):
        answer(made, f"first {i}", SYSTEM + run_of(10 + i, 64), cached=len(SYSTEM) if i else 0, now=float(i))
    answer(made, "again", SYSTEM + run_of(10, 64) + [5], cached=len(SYSTEM) + 64 - missing, now=5.0)
    assert [matched(made, SYSTEM + run_of(10 + i, 64)) for i in range(3)] == [len(SYSTEM) + 64] * 3


def test_a_partial_loss_lowers_only_what_was_reported_missing() -> None:
    made = scheduler_of("e2", A, block_size=BLOCK)
    document = SYSTEM + run_of(2, 10 * BLOCK)
    answer(made, "other", run_of(7, 100), cached=0)
    answer(made, "below", document + run_of(3, 64), cached=0, now=1.0)
    answer(made, "beside", SYSTEM + run_of(4, 64), cached=len(SYSTEM), now=2.0)
    answer(made, "again", document + run_of(5, 64), cached=len(SYSTEM) + 5 * BLOCK, now=3.0)
    assert matched(made, document + run_of(3, 64)) == len(document), "its end is below what was missing"
    assert matched(made, SYSTEM + run_of(4, 64)) == len(SYSTEM) + 64
    assert matched(made, document + run_of(5, 64)) == len(document) + 64, "the request has just computed it"
    assert matched(made, run_of(7, 100)) == 96
    made.check()


def test_the_block_size_is_learned_from_the_reports() -> None:
    made = scheduler_of("e2", A, block_size=BLOCK)
    lengths = (900, 1000, 1100, 700)
    for turn in range(2):
        for length in lengths:
            cached = length // 128 * 128 if turn else 0
            answer(made, f"{turn}-{length}", [*run_of(length, length), turn], cached=cached, now=float(turn))
    assert [matched(made, run_of(length, length)) for length in lengths] == [n // 128 * 128 for n in lengths]


def test_a_block_size_that_was_learned_too_large_is_corrected_by_the_next_report() -> None:
    made = scheduler_of("e2", A, block_size=BLOCK)
    for i, cached in enumerate((0, 256, 512, 768)):
        answer(made, f"{i}", run_of(1, 800), cached=cached, now=float(i))
    assert matched(made, run_of(1, 800)) == 768
    answer(made, "last", [*run_of(1, 800), 2], cached=784, now=9.0)
    assert matched(made, run_of(1, 800)) == 800
