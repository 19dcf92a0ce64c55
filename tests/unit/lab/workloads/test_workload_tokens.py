"""Prompts as token ids without a model."""

from __future__ import annotations

import pytest

from preble.core.types import pack_tokens, unpack_tokens
from preble.lab.workloads import Segment, WorkloadRequest, make_workload, packed_prompt
from preble.prompts.words import word_tokens


@pytest.mark.parametrize(
    "pieces",
    [
        [("a", "You are kind.\n"), (None, "Why?")],
        [("a", "no new line "), (None, "at its end")],
        [("a", "half a wo"), ("b", "rd\n"), (None, " and more")],
        [(None, "own first "), ("a", "then shared\n"), ("b", "and shared\n")],
        [(None, ""), ("a", "\n"), (None, "x")],
    ],
)
def test_a_prompt_has_the_same_tokens_whole_and_in_segments(pieces: list[tuple[str | None, str]]) -> None:
    request = WorkloadRequest("r", tuple(Segment(name, text=text) for name, text in pieces), 1)
    assert list(unpack_tokens(packed_prompt(request))) == word_tokens("".join(text for _, text in pieces))


def test_token_ids_stay_as_they_are() -> None:
    parts = (Segment("a", tokens=pack_tokens([1, 2])), Segment(tokens=pack_tokens([3])))
    assert packed_prompt(WorkloadRequest("r", parts, 1)) == pack_tokens([1, 2, 3])


def test_requests_for_one_tool_share_its_documentation_as_tokens() -> None:
    first, *others = make_workload("tool_use", 40, 0).requests
    twin = next(request for request in others if request.group == first.group)
    shared = len(packed_prompt(WorkloadRequest("shared", first.segments[:2], 1)))
    assert packed_prompt(first)[:shared] == packed_prompt(twin)[:shared]
    assert packed_prompt(first) != packed_prompt(twin)
