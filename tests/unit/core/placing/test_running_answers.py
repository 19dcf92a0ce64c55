"""Answers that turn out longer than expected are learned before they end.

A sequence makes a decode iteration 1 ms longer, so alone it makes a token every millisecond.
"""

from __future__ import annotations

from sys import getrefcount

import pytest

from preble.core.placing.running_answers import LOOKS, OUTLIVED
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.prefixes.radix_tree import Match, expected_output_tokens
from preble.core.types import ReplicaId, Request, RequestId, pack_tokens
from support.by_hand import A, B, run_of, scheduler_of

DOC = run_of(1, 50)
DEFAULT_OUTPUT_TOKENS = 45
TOKEN_S = 0.001


def ask(made: GlobalScheduler, name: str, now: float, *, replica: ReplicaId = A) -> None:
    """A question about the document, whose first token comes at once."""
    made.place(
        Request(RequestId(name), Request.of(name, [*DOC, *name.encode()]).prompt, avoid=frozenset({A, B}) - {replica}),
        now,
    )
    made.on_first_token(RequestId(name), now)


def expected(made: GlobalScheduler) -> float:
    """The length of the answer to another question about the document."""
    return expected_output_tokens(probed(made).path, made._cluster.window.mean_answer_tokens)


def probed(made: GlobalScheduler) -> Match:
    return made._cluster.index.match(pack_tokens([*DOC, 0]))


def in_flight(made: GlobalScheduler, replica: ReplicaId = A) -> int:
    return made._replicas.expected_output_tokens[made._replicas.replica(replica)]


def begun() -> GlobalScheduler:
    """Two questions are being answered from 0 s on; nobody ever saw an answer end."""
    made = scheduler_of("preble", A, B)
    for name in ("q0", "q1"):
        ask(made, name, 0.0)
    return made


def test_an_answer_that_outlives_its_expectation_lets_expect_longer_ones_before_any_has_ended() -> None:
    made = begun()
    ask(made, "soon", OUTLIVED * DEFAULT_OUTPUT_TOKENS * 2 * TOKEN_S * 0.9)
    assert expected(made) == DEFAULT_OUTPUT_TOKENS
    ask(made, "late", 3.0)
    assert expected(made) > 5 * DEFAULT_OUTPUT_TOKENS
    made.check()


def test_what_is_in_flight_counts_as_longer_too_until_it_ends() -> None:
    made = begun()
    ask(made, "late", 3.0)
    assert in_flight(made) > 2 * 500, "each of two has made some 1,000 tokens"
    for name in ("q0", "q1", "late"):
        made.on_finish(RequestId(name), 1000, 3.5)
    assert in_flight(made) == 0
    made.check()


def test_an_answer_that_has_ended_counts_as_long_as_it_was_whatever_was_noted_while_it_ran() -> None:
    noted, plain = begun(), begun()
    for i in range(10):
        ask(noted, f"late {i}", 3.0 + i)
    for made in (noted, plain):
        for name in ("q0", "q1"):
            made.on_finish(RequestId(name), 700, 20.0)
    for i in range(10):
        noted.on_finish(RequestId(f"late {i}"), 0, 20.0)
    assert probed(plain).path
    history = probed(noted).path[0].history
    assert history is not None
    assert history._tokens <= 2 * 700 + 1


def test_answers_that_are_lost_with_their_replica_teach_nothing() -> None:
    made = begun()
    ask(made, "late", 3.0)
    ask(made, "elsewhere", 3.0, replica=B)
    assert expected(made) > 5 * DEFAULT_OUTPUT_TOKENS
    made.remove_replica(A, 3.0)
    assert expected(made) == pytest.approx(DEFAULT_OUTPUT_TOKENS)


def test_the_row_holds_no_more_than_what_runs() -> None:
    made = scheduler_of("preble", A, B)
    for i in range(1000):
        ask(made, f"q{i}", float(i))
        made.on_finish(RequestId(f"q{i}"), 5, i + 0.5)
    assert len(made._in_flight._running.row) <= LOOKS


def test_an_answer_that_a_long_prompt_holds_up_has_not_outlived_its_expectation() -> None:
    made = begun()
    made.place(Request(RequestId("long"), Request.of("long", run_of(2, 3000)).prompt, avoid=frozenset({B})), 0.0)
    made.on_first_token(RequestId("long"), 3.0)
    ask(made, "late", 3.0)
    assert expected(made) == DEFAULT_OUTPUT_TOKENS


def test_an_answer_that_has_ended_keeps_no_prompt() -> None:
    made = scheduler_of("preble", A, B)
    asked = Request.of("q", [*DOC, 1])
    before = getrefcount(asked)
    made.place(asked, 0.0)
    made.on_first_token(RequestId("q"), 1.0)
    made.on_finish(RequestId("q"), 10, 2.0)
    assert getrefcount(asked) == before
