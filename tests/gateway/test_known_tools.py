"""Decoded tools are remembered within a budget."""

from __future__ import annotations

import tracemalloc

import pytest

from preble.prompts.tokens.chat_template import SGLANG, VLLM, Form
from preble.prompts.tokens.known_tools import KnownTools, decoded_bytes
from preble.prompts.tokens.templates import _tools

LISTS = {
    "empty functions": ["{}"] * 4000,
    "short texts": ['{"parameters":{"a":[' + ",".join(f'"{i}"' for i in range(9000)) + "]}}"],
    "lists": ['{"parameters":{"a":[' + ",".join(["[]"] * 20_000) + "]}}"],
    "wide letters": ['{"description":"' + "a" * 30_000 + '🙂"}'],
    "many names": ['{"parameters":{' + ",".join(f'"{i}🙂":1' for i in range(6000)) + "}}"],
}


def tools(functions: list[str]) -> bytes:
    return ("[" + ",".join(f'{{"function":{function}}}' for function in functions) + "]").encode()


@pytest.mark.parametrize("form", [VLLM, SGLANG], ids=["vllm", "sglang"])
@pytest.mark.parametrize("functions", LISTS.values(), ids=LISTS)
def test_no_list_takes_more_than_it_counts_for(functions: list[str], form: Form) -> None:
    raw = tools(functions)
    tracemalloc.start()
    kept = _tools(raw, form)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept and taken + len(raw) <= decoded_bytes(raw)


def test_the_lists_that_came_last_are_known_as_far_as_the_budget_goes() -> None:
    raws = [tools([f'{{"name":"{name}"}}']) for name in "abcd"]
    known = KnownTools(3 * decoded_bytes(raws[0]))
    for raw in raws[:3]:
        known.put(raw, _tools(raw, VLLM))
    assert known.get(raws[0]) == (True, _tools(raws[0], VLLM))
    known.put(raws[3], None)
    assert [known.get(raw)[0] for raw in raws] == [True, False, True, True], "the least recently used one has gone"
    large = tools(['{"name":"of more than half of the budget"}'] * 10)
    known.put(large, _tools(large, VLLM))
    assert known.get(large) == (False, None) and known.get(raws[3]) == (True, None)
