"""The prefixes that most requests of the window share, as a tree."""

from __future__ import annotations

import pytest

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import Request, RequestId, pack_tokens
from support.by_hand import scheduler_of

TOOLS, SEARCH, CODE = range(100), range(1000, 1050), range(2000, 2080)


@pytest.fixture
def scheduler() -> GlobalScheduler:
    return scheduler_of("round_robin", "a", "b", settings={"window_s": 60.0}, block_size=16)


def place(scheduler: GlobalScheduler, number: int, *runs: range, now: float = 0.0, namespace: str = "") -> None:
    tokens = pack_tokens([token for run in (*runs, range(10_000 + 50 * number, 10_050 + 50 * number)) for token in run])
    request_id = RequestId(f"{namespace}{number}")
    scheduler.place(Request(request_id, tokens, namespace=namespace), now)
    scheduler.on_first_token(request_id, now)
    scheduler.on_finish(request_id, 5, now)


def test_the_tree_has_who_uses_each_run_and_who_holds_it(scheduler: GlobalScheduler) -> None:
    for number, task in enumerate((SEARCH, SEARCH, CODE, CODE, CODE)):
        place(scheduler, number, TOOLS, task)
    tools, code, search = scheduler.hottest(10)
    assert (tools.parent, tools.start, tools.end, tools.uses) == (None, 0, 100, 5)
    assert (code.parent, code.start, code.end, code.uses) == (0, 100, 180, 3)
    assert (search.parent, search.start, search.end, search.uses) == (0, 100, 150, 2)
    assert set(tools.holders) == {"a", "b"} and tools.partly == ()
    assert len({tools.name, code.name, search.name}) == 3


def test_a_name_stays_while_the_tree_grows(scheduler: GlobalScheduler) -> None:
    place(scheduler, 0, TOOLS, SEARCH)
    place(scheduler, 1, TOOLS, SEARCH)
    [before] = scheduler.hottest(10)
    place(scheduler, 2, TOOLS, CODE)
    assert scheduler.hottest(10)[0].name == before.name


def test_a_prefix_names_the_last_known_request_that_uses_it_though_it_has_ended(scheduler: GlobalScheduler) -> None:
    for number, task in enumerate((SEARCH, SEARCH, CODE, CODE)):
        place(scheduler, number, TOOLS, task, now=float(number))
    assert {hot.request_id for hot in scheduler.hottest(10)} == {""}
    known = {float(number): RequestId(str(number)) for number in (0, 1, 2)}
    named = {(hot.start, hot.end): hot.request_id for hot in scheduler.hottest(10, known)}
    assert named == {(0, 100): "2", (100, 150): "1", (100, 180): "2"}


def test_requests_of_one_moment_name_no_prefix(scheduler: GlobalScheduler) -> None:
    for number, task in enumerate((SEARCH, SEARCH, CODE, CODE)):
        place(scheduler, number, task, now=float(number // 2))
    known = {0.0: RequestId("0"), 1.0: RequestId("1")}
    assert {hot.request_id for hot in scheduler.hottest(10, known)} == {""}
    place(scheduler, 4, SEARCH, now=2.0)
    named = {hot.uses: hot.request_id for hot in scheduler.hottest(10, known | {2.0: RequestId("4")})}
    assert named == {3: "4", 2: ""}


def test_prompts_of_different_namespaces_have_different_names(scheduler: GlobalScheduler) -> None:
    for number in range(2):
        for namespace in ("", "tenant"):
            place(scheduler, number, TOOLS, namespace=namespace)
    one, other = scheduler.hottest(10)
    assert one.name != other.name and one.uses == other.uses == 2


def test_a_prompt_of_one_request_is_not_hot_and_nothing_is_after_the_window(scheduler: GlobalScheduler) -> None:
    place(scheduler, 0, TOOLS)
    assert scheduler.hottest(10) == []
    place(scheduler, 1, TOOLS)
    assert len(scheduler.hottest(10)) == 1
    scheduler.on_timer(100.0)
    assert scheduler.hottest(10) == []


def test_a_run_shorter_than_a_block_is_left_out_and_what_is_below_it_stays(scheduler: GlobalScheduler) -> None:
    for number in range(4):
        place(scheduler, number, range(3), SEARCH if number % 2 else CODE)
    assert sorted((hot.parent, hot.start, hot.uses) for hot in scheduler.hottest(10)) == [(None, 3, 2), (None, 3, 2)]


def test_no_more_than_asked_for_the_most_used_first(scheduler: GlobalScheduler) -> None:
    for number in range(12):
        place(scheduler, number, range(500 * (number % 3), 500 * (number % 3) + 40), *([SEARCH] if number % 3 else []))
    assert [hot.uses for hot in scheduler.hottest(2)] == [4, 4]
