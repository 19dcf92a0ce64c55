"""Reservations on the real serving room: carriers report from elsewhere, and some of them die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.fakes import FakeReplica, replicas
from preble.core.types import ReplicaId, pack_tokens
from preble.core.types.life import Alive, Ended, FirstToken, Moved, Outcome, Progress
from preble.errors import NoReplicaError, RequestError
from preble.prompts.endpoints import COMPLETIONS, Fields
from preble.reservations import LONGEST_LEASE_S, ReservationHeld, Reservations, UnknownReservation
from preble.serving import Serving
from serving.test_carrier import config
from support.waiting import eventually

BODY = b'{"model": "tiny", "prompt": "hello", "max_tokens": 5}'


@asynccontextmanager
async def reservations(
    count: int = 1, **changes: Any
) -> AsyncIterator[tuple[Reservations, Serving, list[FakeReplica]]]:
    """Reservations before live replicas; at the end nothing may be in flight, after `close` alone."""
    async with replicas(count) as fakes:
        serving = await Serving.start(config(fakes, **changes))
        try:
            await eventually(lambda: len(serving.replicas) == count)
            held = Reservations(serving)
            yield held, serving, fakes
            await held.close()
            held.check()
            assert (len(held), serving.num_in_flight, serving.num_admitted) == (0, 0, 0)
            serving.scheduler.check()
        finally:
            await serving.close()


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_request_is_followed_from_its_reservation_to_its_end() -> None:
    async with reservations() as (held, serving, [fake]):
        one = await held.reserve(COMPLETIONS, {}, BODY, reservation_id="mine")
        assert (one.engine.url, one.request.body, serving.num_in_flight) == (fake.url, BODY, 1)
        held.report("mine", FirstToken(), now())
        held.report("mine", Progress(3, 2), now())
        held.report("mine", Ended(output_tokens=5, cached_tokens=4), now())
        [decision] = serving.recent.of_request("mine")
        assert (decision.outcome, decision.output_tokens, decision.cached_tokens) == ("ok", 5, 4)
        assert decision.first_token_s is not None and one.output_tokens == 5
        for fact in (Ended(), FirstToken(), Alive()):
            with pytest.raises(UnknownReservation):
                held.report("mine", fact, now())


async def test_token_ids_can_be_given_without_a_body() -> None:
    async with reservations() as (held, _, _):
        fields = Fields(model="tiny", prompts=[pack_tokens(range(30))], max_output_tokens=7)
        assert (await held.reserve(COMPLETIONS, {}, fields)).placement.num_prompt_tokens == 30


async def test_a_list_of_prompts_goes_to_one_replica_and_shares_its_tokens() -> None:
    async with reservations(2) as (held, serving, _):
        one = await held.reserve(COMPLETIONS, {}, b'{"prompt": ["a", "bc", "def"]}', reservation_id="list")
        assert serving.num_in_flight == 3
        for count in range(5):
            assert held.report("list", Progress(count), now()).output_tokens == count
        held.report("list", Ended(output_tokens=9), now())
        decisions = [d for index in range(3) for d in serving.recent.of_request(f"list#{index}")]
        assert {d.output_tokens for d in decisions} == {3} and len({d.replica for d in decisions}) == 1
        assert {d.replica for d in decisions} == {one.placement.replica_id}


async def test_a_carrier_that_dies_leaks_nothing() -> None:
    async with reservations() as (held, serving, _):
        await held.reserve(COMPLETIONS, {}, BODY, reservation_id="dead", lease_s=0.02)
        await eventually(lambda: "dead" not in held)
        assert (serving.num_in_flight, held.num_expired) == (0, 1)
        assert [d.outcome for d in serving.recent.of_request("dead")] == ["aborted"]
        with pytest.raises(UnknownReservation):
            held.report("dead", Ended(), now())
        await held.reserve(COMPLETIONS, {}, BODY, reservation_id="dead")


async def test_a_shorter_lease_counts_at_once() -> None:
    async with reservations() as (held, _, _):
        await held.reserve(COMPLETIONS, {}, BODY, reservation_id="short")
        held.report("short", Alive(0.02), now())
        await eventually(lambda: "short" not in held)


async def test_reports_renew_the_lease() -> None:
    async with reservations() as (held, _, _):
        await held.reserve(COMPLETIONS, {}, BODY, reservation_id="alive", lease_s=10.0)
        for fact in (FirstToken(), Alive(), Progress(1)):
            before = held.next_at()
            await asyncio.sleep(0.001)
            held.report("alive", fact, now())
            assert before is not None and held.next_at() > before  # type: ignore[operator]


async def test_ids_and_leases_that_cannot_be_are_refused_and_take_nothing() -> None:
    async with reservations() as (held, serving, _):
        await held.reserve(COMPLETIONS, {}, BODY, reservation_id="one")
        with pytest.raises(ReservationHeld):
            await held.reserve(COMPLETIONS, {}, BODY, reservation_id="one")
        for wrong in ("", "a b", "a/b", "x" * 129):
            with pytest.raises(RequestError, match="1 to 128 letters"):
                await held.reserve(COMPLETIONS, {}, BODY, reservation_id=wrong)
        for lease_s in (0.0, -1.0, LONGEST_LEASE_S + 1, float("nan")):
            with pytest.raises(RequestError, match="lease_s"):
                await held.reserve(COMPLETIONS, {}, BODY, lease_s=lease_s)
        with pytest.raises(RequestError):
            await held.reserve(COMPLETIONS, {}, b"no JSON", reservation_id="two")
        with pytest.raises(NoReplicaError):
            await held.reserve(COMPLETIONS, {}, BODY, reservation_id="two", avoid=lambda: frozenset(serving.replicas))
        assert (len(held), serving.num_admitted) == (1, 1)
        await held.reserve(COMPLETIONS, {}, BODY, reservation_id="two")


async def test_replicas_that_the_carrier_rules_out_are_avoided_and_failures_count_against_a_replica() -> None:
    async with reservations(2) as (held, _, fakes):
        other = ReplicaId(fakes[0].url)
        one = await held.reserve(COMPLETIONS, {}, BODY, avoid=lambda: frozenset({other}))
        assert one.engine.url == fakes[1].url
        asked = fakes[1].questions
        held.report(one.reservation_id, Ended(Outcome.ENGINE_REFUSED), now())
        await eventually(lambda: fakes[1].questions > asked)


async def test_a_carrier_may_send_the_request_to_another_replica() -> None:
    async with reservations(2) as (held, serving, fakes):
        one = await held.reserve(COMPLETIONS, {}, BODY)
        [other] = [ReplicaId(fake.url) for fake in fakes if fake.url != one.engine.url]
        for _ in range(2):
            one.report(Moved(other), now())
        in_flight = {name: state.num_requests for name, state in serving.scheduler.snapshot().replicas.items()}
        assert one.engine.url == other and in_flight[other] == sum(in_flight.values()) == 1
        with pytest.raises(NoReplicaError):
            one.report(Moved(ReplicaId("http://nowhere")), now())


async def test_a_carrier_sees_that_a_replica_has_left_and_may_still_end_well() -> None:
    async with reservations() as (held, serving, [fake]):
        one = await held.reserve(COMPLETIONS, {}, BODY, reservation_id="r")
        assert one.loss is None
        await fake.stop()
        await eventually(lambda: one.loss is not None)
        held.report("r", Ended(output_tokens=2), now())
        assert [d.outcome for d in serving.recent.of_request("r")] == ["ok"]
