"""Lists of token ids in bodies: exactly those that a JSON decoder finds, and nothing else is taken for ids."""

from __future__ import annotations

import json
from itertools import chain
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from preble.core.types import pack_tokens
from preble.errors import RequestError
from preble.prompts.endpoints import bodies
from preble.prompts.endpoints.bodies import PromptLimits, decode_prompts

LIMITS = PromptLimits(10, inf)
IDS = st.one_of(st.integers(0, 200_000), st.integers(0, 2**32 - 1), st.sampled_from([0, 2**32 - 1]))
OTHERS: st.SearchStrategy[Any] = st.sampled_from(
    [True, False, None, 1.5, 1e300, 2.0, -1, -(2**63), 2**32, 2**63, 2**64, 10**30, "1", "", [], [1], {}]
)
SPACES = st.sampled_from(["", " ", "\n", " \t\r\n "])


def written(values: list[Any], space: str) -> bytes:
    inside = f"{space},{space}".join(map(json.dumps, values))
    return f"[{space}{inside}{space}]".encode()


@given(values=st.lists(IDS, min_size=1), space=SPACES, piece=st.sampled_from([16, 100, 2**16]))
def test_ids_are_those_that_were_sent(values: list[int], space: str, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_PIECE_BYTES", piece)  # ships 64 KiB
        assert decode_prompts(Raw(written(values, space)), LIMITS) == [pack_tokens(values)]


@pytest.mark.parametrize(
    "prompt",
    [
        "[[1],1234]",
        "[[1],-1234]",
        '[[1],"12,13"]',
        '[[1],"a"]',
        "[[1],true]",
        "[[1],null]",
        "[[ ]]",
        "[[1],[\n]]",
        "[ ]",
    ],
)
def test_what_is_no_list_of_ids_is_no_prompt(prompt: str) -> None:
    with pytest.raises(RequestError):
        decode_prompts(Raw(prompt.encode()), LIMITS)


@given(before=st.lists(IDS), other=OTHERS, after=st.lists(IDS), space=SPACES, piece=st.sampled_from([16, 2**16]))
def test_a_list_with_anything_else_is_refused(
    before: list[int], other: object, after: list[int], space: str, piece: int
) -> None:
    values = list(chain([1], before, [other], after))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RequestError):
        patch.setattr(bodies, "_PIECE_BYTES", piece)  # ships 64 KiB
        decode_prompts(Raw(written(values, space)), LIMITS)
