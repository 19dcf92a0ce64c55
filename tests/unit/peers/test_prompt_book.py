"""A prompt as gateways name it to each other."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble.core.types import PackedTokens, pack_tokens
from preble.peers.prompt_book import CHUNK_TOKENS, LONGEST_TAIL, PromptBook, PromptName

lengths = st.integers(0, 5 * CHUNK_TOKENS)


def prompt_of(seed: int, num_tokens: int) -> PackedTokens:
    return pack_tokens(Random(seed).randrange(30_000) for _ in range(num_tokens))


def read_all(book: PromptBook, names: list[PromptName]) -> PackedTokens | None:
    *before, name = names
    for piece in before:
        book.read(piece)
    return book.read(name)


@pytest.mark.slow
@settings(deadline=None)
@given(prompts=st.lists(st.tuples(st.integers(0, 2), lengths, st.integers(0, 2), lengths), max_size=8))
def test_whoever_heard_all_before_reads_every_prompt(prompts: list[tuple[int, int, int, int]]) -> None:
    ours, theirs = PromptBook(), PromptBook()
    for head, head_tokens, tail, tail_tokens in prompts:
        prompt = PackedTokens(prompt_of(head, head_tokens) + prompt_of(tail, tail_tokens))
        assert read_all(theirs, ours.names(prompt)) == prompt


def test_only_what_was_never_told_goes_as_tokens() -> None:
    ours, theirs = PromptBook(), PromptBook()
    system = prompt_of(1, 10 * CHUNK_TOKENS)
    first, second = (PackedTokens(system + prompt_of(seed, 50)) for seed in (2, 3))
    (whole,) = ours.names(first)
    assert whole == PromptName(b"", first)
    theirs.read(whole)
    (rest,) = theirs.names(second)
    assert rest.tail == second[len(system) :]
    assert ours.read(rest) == second


def test_a_gateway_that_did_not_hear_the_head_does_not_guess() -> None:
    ours, late = PromptBook(), PromptBook()
    prompt = prompt_of(1, 300)
    ours.names(prompt)
    (name,) = ours.names(prompt)
    assert late.read(name) is None
    ours.doubt(name.head)
    assert read_all(late, ours.names(prompt)) == prompt


def test_a_newcomer_is_told_everything_again() -> None:
    ours, late = PromptBook(), PromptBook()
    prompt = prompt_of(1, 300)
    ours.names(prompt)
    ours.doubt_all()
    assert read_all(late, ours.names(prompt)) == prompt
    assert read_all(late, ours.names(prompt)) == prompt


def test_a_long_prompt_goes_in_pieces() -> None:
    ours, theirs = PromptBook(), PromptBook()
    prompt = prompt_of(1, 2 * LONGEST_TAIL * CHUNK_TOKENS + 5)
    pieces = ours.names(prompt)
    assert len(pieces) == 2 and all(len(piece.tail) < 1024 * 1024 for piece in pieces)
    assert read_all(theirs, pieces) == prompt


def test_the_memory_is_bounded_and_what_may_be_gone_elsewhere_is_told_again() -> None:
    ours, theirs = PromptBook(100 * 800), PromptBook(100 * 800)
    hot = prompt_of(0, 10 * CHUNK_TOKENS)
    for seed in range(1, 40):
        for prompt in (hot, prompt_of(seed, 10 * CHUNK_TOKENS)):
            assert read_all(theirs, ours.names(prompt)) == prompt
    assert len(ours) == len(theirs) == 100
    assert ours.names(hot)[-1].tail == b"", "what is used often stays"
    assert read_all(theirs, ours.names(prompt_of(1, 10 * CHUNK_TOKENS))) == prompt_of(1, 10 * CHUNK_TOKENS)
