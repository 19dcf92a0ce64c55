"""What docs/evaluation.md shows of real engines near saturation is what was kept, and how it is measured."""

from __future__ import annotations

from types import ModuleType

import msgspec
import pytest

from preble.lab.metrics import RequestRecord, summarize
from support.scripts import script


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return script("benchmarks/repro/real_check.py")


def test_the_table_and_values_of_the_page_are_those_of_the_kept_results(check: ModuleType) -> None:
    pages, results = script("benchmarks/repro/page.py"), check.known_results()
    made = check.tables(results) | check.values(results)
    texts = [path.read_text(encoding="utf-8") for path in pages.EVALUATION]
    named = {name for text in texts for name in pages.names(text) if name.startswith(("real-", "value:real-"))}
    assert made.keys() == named
    for text in texts:
        assert pages.filled(text, made) == text, "fill it in: python benchmarks/repro/real_check.py --draw"


def test_every_policy_got_the_same_requests_in_a_round_and_answered_them(check: ModuleType) -> None:
    results = check.known_results()
    assert results is not None and results.rounds >= 3
    for number in range(results.rounds):
        turns = [turn for turn in results.turns if turn.round == number]
        assert [turn.policy for turn in turns] == check.order(number)
        assert len({turn.measured.summary.requests for turn in turns}) == 1
    assert not any(turn.measured.summary.errors for turn in results.turns)


def test_the_caches_hold_half_of_the_tools(check: ModuleType) -> None:
    tools = {request.group: request.segments[:-1] for request in check.requests()}
    tokens = sum(segment.num_tokens for segments in tools.values() for segment in segments)
    assert len(tools) == check.NUM_TOOLS
    assert check.REPLICAS * check.KV_TOKENS / tokens == pytest.approx(0.5, abs=0.05)


def test_rounds_ask_other_requests_for_the_same_tools_and_policies_take_turns(check: ModuleType) -> None:
    first, second = check.workloads(2, rps=5.0, turn_s=100.0)
    assert not {request.request_id for request in first.requests} & {request.request_id for request in second.requests}
    assert {request.group for request in second.requests} <= {request.group for request in check.requests()}
    orders = [check.order(number) for number in range(3)]
    assert all(sorted(order) == sorted(check.POLICIES) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_the_search_keeps_a_fixed_number_of_requests_in_flight(check: ModuleType) -> None:
    load = check.closed_loop(check.requests()[:100])
    assert len(load.openers) == check.USERS
    assert sum(map(len, load.children().values())) == 100 - check.USERS
    assert all(len(children) == 1 for children in load.children().values())


def test_a_policy_is_compared_with_preble_round_by_round(check: ModuleType) -> None:
    def turn(number: int, policy: str, e2e_s: float) -> object:
        record = RequestRecord(
            request_id="q", scheduled_s=0.0, sent_s=0.0, first_token_s=e2e_s / 2, end_s=e2e_s, prompt_tokens=100,
            cached_tokens=40,
        )  # fmt: skip
        busy = dict.fromkeys(("replica", "gateway", "client", "others"), 0.1)
        return check.Turn(number, 0, policy, check.Measured(summarize([record]), busy))

    turns = [turn(n, policy, (1 + n) * (2.0 if policy == "e2" else 1.0)) for n in range(3) for policy in check.POLICIES]
    incomplete = [turn(3, "e2", 99.0)]
    searched = {"least_load": 5.0, "preble": 6.0}
    results = check.Results("2026-01-01", "vLLM 1", 2, searched, "least_load", 4.5, 100.0, [*turns, *incomplete])
    table = check.turns_table(results)
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert rows["e2"]["E2E mean over preble's"] == "2 ± 0"
    assert rows["e2"]["E2E mean, ms"] == "4,000 ± 5,000"
    assert rows["preble"]["hit rate, %"] == "40 ± 0"
    assert rows["preble"]["computed tokens a request"] == "60 ± 0"
    assert msgspec.json.decode(msgspec.json.encode(results), type=check.Results) == results
