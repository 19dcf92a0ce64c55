"""The policy `preble` through the scheduler's door, on examples worked by hand.

A prefill takes 1 ms a token, one more sequence makes a decode iteration 1 ms longer, blocks have one token.
"""

from __future__ import annotations

from math import exp, log

import pytest

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.preble import Preble
from preble.core.prefixes.history import MEMORY_S, PRIOR_ANSWERS, PrefixHistory
from preble.core.types import Candidate, Placement, Reason, ReplicaId, ReplicaSpec, Request, RequestId
from support.by_hand import MODEL, A, B, C, scheduler_of

DEFAULT_OUTPUT_TOKENS = 45


def expected_tokens(answers: list[int], prior: float) -> float:
    """Worked by hand: the mean of the answers and of `PRIOR_ANSWERS` more of the length `prior`."""
    return (sum(answers) + PRIOR_ANSWERS * prior) / (len(answers) + PRIOR_ANSWERS)


def cluster(*names: ReplicaId, policy: Preble | None = None, capacity: int = 10_000) -> GlobalScheduler:
    return scheduler_of(policy or Preble(), *names, kv_capacity_tokens=capacity)


def tokens(first: int, count: int) -> list[int]:
    return [first * 10_000 + i for i in range(count)]


def ask(
    made: GlobalScheduler, name: str, prompt: list[int], now: float = 0.0, only: ReplicaId | None = None
) -> Placement:
    avoid = frozenset(r for r in made.snapshot().replicas if only is not None and r != only)
    request = Request.of(name, prompt)
    return made.place(Request(request.request_id, request.prompt, avoid=avoid), now)


def candidate(placement: Placement, replica: ReplicaId) -> Candidate:
    return next(c for c in placement.candidates if c.replica_id == replica)


def test_the_delay_is_the_sum_of_its_five_terms() -> None:
    made = cluster(A, B)
    ask(made, "waits", tokens(1, 300), only=A)
    placement = ask(made, "q", tokens(2, 200), now=10.0)
    v, crowding = 4.0, 4.0
    rate = 1 / 10.0 / 2  # one request in ten seconds, on two replicas
    on_a, on_b = candidate(placement, A), candidate(placement, B)
    assert on_a.load_s == pytest.approx(v * 0.3 + 2 * DEFAULT_OUTPUT_TOKENS * 1 * 0.001)
    assert on_a.prefill_s == pytest.approx(0.2 * (v + 1) + v * crowding * rate * 0.2 * (0.3 + 0.1))
    assert on_b.load_s == 0.0
    assert on_b.prefill_s == pytest.approx(0.2 * v + v * crowding * rate * 0.2 * 0.1)
    assert on_a.eviction_s == on_b.eviction_s == 0.0
    assert (placement.replica_id, placement.reason) == (B, Reason.EXPLORE)


@pytest.mark.parametrize(("waiting_elsewhere", "held_up_s"), [(0, 0.6 * (10 - 0.3)), (20_000, 10 * 10 / 2)])
def test_who_comes_turns_away_from_a_long_prompt_where_another_replica_is_sooner(
    waiting_elsewhere: int, held_up_s: float
) -> None:
    made = cluster(A, B, capacity=100_000)
    for i in range(40):
        ask(made, f"chat {i}", tokens(i, 100), now=float(i))
        made.on_finish(RequestId(f"chat {i}"), 1, i + 0.5)
    if waiting_elsewhere:
        ask(made, "waits", [*range(waiting_elsewhere)], now=40.0, only=B)
    placement = ask(made, "long", [*range(500_000, 510_000)], now=40.0)
    rate = (40 + bool(waiting_elsewhere)) / 40.0 / 2
    assert candidate(placement, A).prefill_s == pytest.approx(10 * 4.0 + 16 * rate * held_up_s)


def waited_s(prefill_s: float, at_most_s: float) -> float:
    """The integral of what is left of a prefill, of which nobody waits for more than this."""
    return prefill_s**2 / 2 if prefill_s <= at_most_s else at_most_s * (prefill_s - at_most_s / 2)


def test_those_who_use_a_prefix_wait_at_its_only_holder_as_long_as_it_takes_to_compute_elsewhere() -> None:
    """Ten chats a second on B; once a second a question about a document that A alone has, behind three seconds."""
    made = cluster(A, B, capacity=100_000)
    document = [*range(1_000_000, 1_002_000)]
    for i in range(220):
        prompt = [*document, 100 + i] if i % 11 == 0 else [2_000_000 + i]
        ask(made, f"q{i}", prompt, now=i / 11, only=A if i % 11 == 0 else B)
        made.on_first_token(RequestId(f"q{i}"), i / 11 + 0.01)
        made.on_finish(RequestId(f"q{i}"), 1, i / 11 + 0.02)
    ask(made, "waits", [*range(3_000_000, 3_003_000)], now=20.0, only=A)
    placement = ask(made, "next", [*document, *tokens(1, 500)], now=20.0)
    uses_per_s = sum(exp(-(20.0 - i) / MEMORY_S) / MEMORY_S for i in range(1, 20))  # the first one made it known
    rate = 221 / 20.0 / 2
    away_s = 6 * int(exp((20 * log(2_001) + log(3_000)) / 221)) / 1000
    turning_away, staying = (waited_s(3.5, s) - waited_s(3.0, s) for s in (away_s, away_s + 2.0))
    part = uses_per_s / rate
    assert 0.1 < part < 0.3
    held_up_s = turning_away + part * (staying - turning_away)
    assert candidate(placement, A).prefill_s == pytest.approx(0.5 * (4.0 + 1) + 16 * rate * held_up_s)


def test_one_document_does_not_change_when_chats_turn_away() -> None:
    made = cluster(A, B, capacity=100_000)
    for i, length in enumerate([100] * 40 + [10_000]):
        ask(made, f"old {i}", [*range(20_000 * i, 20_000 * i + length)], now=float(i))
        made.on_finish(RequestId(f"old {i}"), 1, i + 0.5)
    placement = ask(made, "long", [*range(5_000_000, 5_010_000)], now=41.0)
    typical_s = int(exp((40 * log(100) + log(10_000)) / 41)) / 1000  # 111 tokens; the mean is 341
    held_up_s = 6 * typical_s * (10 - 6 * typical_s / 2)
    assert candidate(placement, A).prefill_s == pytest.approx(10 * 4.0 + 16 * 41 / 41.0 / 2 * held_up_s)


def decoding_slows(answer_s: float) -> float:
    """The delay that decoding together adds on A, after 20 answers of 21 tokens that took `answer_s` each."""
    made = cluster(A, B)
    for i in range(20):
        at = 20.0 * i
        ask(made, f"old {i}", tokens(i, 300), at, only=A)
        made.on_first_token(RequestId(f"old {i}"), at + 0.3)
        made.on_finish(RequestId(f"old {i}"), 21, at + 0.3 + answer_s)
    ask(made, "decodes", tokens(20, 300), 500.0, only=A)
    made.on_first_token(RequestId("decodes"), 500.3)
    return candidate(ask(made, "q", tokens(21, 300), 501.0), A).load_s


def test_decoding_counts_by_the_seconds_that_answers_took_whatever_length_was_reported() -> None:
    as_predicted_s = 20 * MODEL.iteration_s((), 1, 0)
    as_predicted = decoding_slows(as_predicted_s)
    assert decoding_slows(4 * as_predicted_s) == pytest.approx(4 * as_predicted)
    assert decoding_slows(1.5 * as_predicted_s) == as_predicted


def test_a_full_cache_makes_a_prefill_dearer_by_the_share_that_is_computed_again() -> None:
    made = cluster(A, B, capacity=500)
    computed = again = 0.0
    for i, (prefix, replica, output_tokens) in enumerate(((1, A, DEFAULT_OUTPUT_TOKENS), (2, B, 1), (1, B, 1))):
        ask(made, f"old {i}", tokens(prefix, 400), only=replica)
        made.on_finish(RequestId(f"old {i}"), 1, 0.0)
        forgotten = exp(-(400 + output_tokens) / 1000)
        computed = computed * forgotten + 400 + output_tokens
        again = again * forgotten + (400 if i == 2 else 0)  # a had computed it before b did
    placement = ask(made, "q", tokens(1, 400) + tokens(3, 60), now=2.0)
    on_a, on_b = candidate(placement, A), candidate(placement, B)
    assert on_a.eviction_s == 0.0, "61 tokens more are 461 there"
    assert on_b.eviction_s == pytest.approx(again / computed * on_b.prefill_s)
    assert placement.replica_id == A


def test_a_prefix_is_exploited_until_waiting_for_it_costs_more_than_computing_it_again() -> None:
    made = cluster(A, B)
    ask(made, "first", tokens(1, 1000), only=A)
    made.on_first_token(RequestId("first"), 1.0)
    made.on_finish(RequestId("first"), 1, 1.0)
    assert ask(made, "hit", [*tokens(1, 1000), 1], now=20.0).reason is Reason.EXPLOIT
    for i in range(3):
        ask(made, f"crowd {i}", tokens(2 + i, 900), now=20.0, only=A)
    away = ask(made, "away", [*tokens(1, 1000), 2], now=20.0)
    assert (away.replica_id, away.reason) == (B, Reason.REPLICATE)


def test_what_many_requests_use_is_cheap_to_copy_and_their_own_part_is_not() -> None:
    made = cluster(A, B)
    shared = tokens(1, 1000)
    for i in range(20):
        ask(made, f"q{i}", [*shared, *tokens(2 + i, 100)], now=float(i), only=A)
        made.on_first_token(RequestId(f"q{i}"), i + 0.5)
        made.on_finish(RequestId(f"q{i}"), 1, i + 0.9)
    placement = ask(made, "next", [*shared, *tokens(50, 100)], now=20.0)
    uses_per_s = sum(exp(-(20.0 - i) / MEMORY_S) / MEMORY_S for i in range(1, 20))  # the first one made it known
    hit_s = 0.1 + MODEL.decode_s(expected_tokens([1] * 19, prior=1.0), 1100)
    x = 4.0 * uses_per_s * hit_s / (1 + 1)
    price = 0.1 + 1.0 / (1 + x**2)  # its own 100 tokens, and the shared part of the 1000
    rate = 20 / 20.0 / 2
    assert candidate(placement, A).prefill_s == pytest.approx(0.1 * 4 + 16 * rate * 0.1 * 0.05)
    assert candidate(placement, B).prefill_s == pytest.approx(price * 4 + 16 * rate * price * price / 2)


@pytest.mark.parametrize(("lasting_s", "least"), [(0.5, 10.0), (20.0, 6.0)])
def test_a_copy_is_paid_by_those_who_come_after_it_is_there(lasting_s: float, least: float) -> None:
    """100 questions of 100 tokens about a document that takes ten seconds to compute, and another request on B."""
    made = cluster(A, B, capacity=100_000)
    ask(made, "other", [50_000], now=100.0, only=B)
    document = [*range(10_000)]
    for i in range(100):
        ask(made, f"q{i}", [*document, *tokens(2 + i, 100)], now=100.0 + i * lasting_s / 100, only=A)
    placement = ask(made, "next", [*document, *tokens(200, 100)], now=100.0 + lasting_s)
    rate = 101 / max(lasting_s, 1.0) / 2
    price = candidate(placement, B).prefill_s
    full = 10.1 * 5 + 16 * rate * 10.1 * 10.1 / 2
    assert least * 5 <= price
    assert (price < full / 2) is (lasting_s > 10.0)


def test_a_second_of_work_that_a_copy_takes_off_the_others_pays_for_eight_of_its_prefill() -> None:
    """20 questions within two seconds about a document of eight seconds, and another request on B."""
    made = cluster(A, B, capacity=100_000)
    ask(made, "other", [50_000], now=100.0, only=B)
    made.on_first_token(RequestId("other"), 100.0)
    document, history = [*range(8_000)], PrefixHistory(100.0)
    for i in range(20):
        now = 100.0 + i / 10
        ask(made, f"q{i}", [*document, *tokens(2 + i, 100)], now=now, only=A)
        if i:  # the first one made it known
            history.note_use(now)
    placement = ask(made, "next", [*document, *tokens(200, 100)], now=102.0)
    hit_s = 0.1 + MODEL.decode_s(DEFAULT_OUTPUT_TOKENS, 8_100)
    price = 8.1 - 8 * history.later_uses(102.0, ready_s=8.0) * hit_s / (1 + 1)
    assert 0.5 < price < 8.0, "neither nothing nor all is paid"
    assert candidate(placement, B).prefill_s == pytest.approx(price * 5 + 16 * (21 / 2.0 / 2) * price * price / 2)


def price_of_a_copy_in_a_burst(began_s: float = 0.0, other: bool = False, capacity: int = 20_000) -> float:
    """The price on B, over that without a discount, after 100 questions of 100 tokens within half a second, about a
    document that takes 9.9 seconds to compute. Before these came one request, `began_s` ago."""
    made = cluster(A, B, capacity=capacity)
    document = [*range(9_900)]
    ask(made, "first", [60_000], now=100.0 - began_s, only=A)
    if other:
        ask(made, "other", [50_000], now=100.0, only=B)
    for i in range(100):
        ask(made, f"q{i}", [*document, *tokens(2 + i, 100)], now=100.0 + i / 200, only=A)
    price = candidate(ask(made, "next", [*document, *tokens(200, 100)], now=100.5), B).prefill_s
    rate = (101 + other) / max(began_s + 0.5, 1.0) / 2
    return price / (10 * (4.0 + other) + 16 * rate * 10 * 10 / 2)


def test_a_copy_that_holds_up_and_evicts_nothing_is_paid_without_a_limit() -> None:
    assert price_of_a_copy_in_a_burst(began_s=90.0) < 0.02
    assert price_of_a_copy_in_a_burst(began_s=90.0, other=True) > 0.8
    assert price_of_a_copy_in_a_burst(began_s=90.0, capacity=10_000) > 0.8


def test_those_who_come_and_do_not_use_a_copy_pay_no_more_than_is_gained() -> None:
    """Of 101 requests a second 20 are known to use it: uses are averaged over five seconds."""
    assert 0.5 < price_of_a_copy_in_a_burst(began_s=0.0) < 0.8


def test_a_hot_prefix_is_on_every_replica_before_its_holder_is_saturated() -> None:
    made = cluster(A, B, C)
    for i in range(150):
        now = i * 0.05  # each hit takes 55 ms of a replica: one could not serve them all
        ask(made, f"q{i}", [*tokens(1, 1000), *tokens(2 + i, 10)], now=now)
        made.on_first_token(RequestId(f"q{i}"), now + 0.04)
    assert (
        len({r for r in made.snapshot().replicas if made.matched_tokens(r, Request.of("probe", tokens(1, 1000))) > 900})
        == 3
    )
    counts = [made.snapshot().replicas[r].num_requests for r in made.snapshot().replicas]
    assert max(counts) <= 1.2 * min(counts)


def test_without_sharing_a_burst_spreads_evenly() -> None:
    made = cluster(A, B, C)
    for i in range(60):
        ask(made, f"q{i}", tokens(i, 100))
    assert {made.snapshot().replicas[r].num_requests for r in made.snapshot().replicas} == {20}


def test_equal_replicas_are_taken_at_random() -> None:
    homes = set()
    for seed in range(20):
        made = GlobalScheduler(Preble(), MODEL, seed=seed)
        for name in (A, B, C):
            made.add_replica(ReplicaSpec(name), 0.0)
        homes.add(ask(made, "q", tokens(1, 10)).replica_id)
    assert homes == {A, B, C}


def test_a_prompt_of_one_token_on_one_replica_is_placed() -> None:
    made = cluster(A)
    assert ask(made, "q", [1]).replica_id == A
    assert ask(made, "r", [1]).replica_id == A
    made.check()


def test_the_load_counts_the_answers_that_the_prefixes_let_expect() -> None:
    """Eleven answers of 1,000 tokens to one prefix, as many of 10 to another; then one of each is in flight."""
    made = cluster(A, B)
    long, short = tokens(1, 100), tokens(2, 100)
    for i in range(11):
        for prefix, replica, output_tokens in ((long, A, 1000), (short, B, 10)):
            request_id = ask(made, f"{replica}{i}", [*prefix, 7000 + i], now=float(i), only=replica).request_id
            made.on_finish(request_id, output_tokens, i + 0.5)
    mean = (11 * 1000 + 11 * 10) / 22
    # The first answer to each came before the prefix was known to be one.
    expect_long = expected_tokens([1000] * 10, prior=mean)
    expect_short = expected_tokens([10] * 10, prior=mean)
    for prefix, replica in ((long, A), (short, B)):
        made.on_first_token(
            ask(made, f"in flight on {replica}", [*prefix, 8000], now=12.0, only=replica).request_id, 12.0
        )
    placement = ask(made, "short", [*short, 9000], now=12.0)
    on_a, on_b = candidate(placement, A), candidate(placement, B)
    assert on_a.load_s == pytest.approx(2 * expect_short * 0.001, rel=1e-2), "they are together as long as the shorter"
    assert on_b.load_s == pytest.approx(2 * expect_short * 0.001, rel=1e-2)
    made.on_finish(RequestId("short"), 10, 13.0)
    placement = ask(made, "long", [*long, 9000], now=13.0)
    on_a, on_b = candidate(placement, A), candidate(placement, B)
    assert on_a.load_s == pytest.approx(2 * expect_long * 0.001, rel=1e-2)
    assert on_b.load_s == pytest.approx(2 * expect_short * 0.001, rel=1e-1)
    made.check()
