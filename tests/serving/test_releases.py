"""Whatever fails as a placement begins or ends, everything lets go of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from operator import attrgetter
from typing import Any

import pytest

from gateway.fakes import replicas
from preble.core.types import ReplicaId
from preble.core.types.life import Outcome, Started
from preble.errors import EngineGone
from preble.prompts.endpoints import COMPLETIONS
from preble.rules.callers import Caller
from preble.serving import Placed, Serving
from support.gateways import quick_config
from support.waiting import eventually

pytestmark = pytest.mark.plain

CALLER = Caller("key", "tenant")


def fails_afterwards(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        method(*args, **named)
        raise ZeroDivisionError

    return call


async def place(serving: Serving) -> Placed:
    parsed = await serving.parse(COMPLETIONS, {}, b'{"prompt": "hello"}', "r", CALLER)
    async with serving.admitted(parsed) as parsed:
        return await serving.place(await serving.tokenize(parsed), parsed.terms)


def assert_released(serving: Serving, replica: str) -> None:
    placements = serving._placements
    assert placements.in_flight == {} == serving.recent._open
    assert serving.scheduler.snapshot().replicas[ReplicaId(replica)].num_requests == 0
    assert placements.ejection._replicas[ReplicaId(replica)].running == {}
    assert serving._turns.admission.running == {}
    serving.scheduler.check()


async def check(
    monkeypatch: pytest.MonkeyPatch,
    failing: str,
    begin_or_end: Callable[[Serving], Awaitable[None]],
    before: Callable[[Serving], Awaitable[None]] | None = None,
) -> None:
    """While the method at this path below `Serving` fails, a placement begins or ends; afterwards all goes well."""
    async with replicas(1) as [fake]:
        serving = await Serving.start(quick_config([fake.url], policy="round_robin"))
        try:
            await eventually(lambda: len(serving.replicas) == 1)
            if before is not None:
                await before(serving)
            path, _, method = failing.rpartition(".")
            with monkeypatch.context() as patch:
                part = attrgetter(path)(serving)
                patch.setattr(part, method, fails_afterwards(getattr(part, method)))
                with pytest.raises(ZeroDivisionError):
                    await begin_or_end(serving)
                assert_released(serving, fake.url)
            (await place(serving)).end()
            assert_released(serving, fake.url)
        finally:
            await serving.close()


HEAR_BOTH = ["_placements.timer.on", "_placements.ejection.on", "recent.on", "telemetry.on", "_turns.on"]
HEAR_THE_END = ["_placements.quarantine.on"]
HEAR_FAILURES = ["replicas.on"]
BROKEN = EngineGone("broken")


@pytest.mark.parametrize("failing", [*HEAR_BOTH, "scheduler.next_timer"])
async def test_a_placement_that_fails_as_it_begins_is_released(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    async def begin(serving: Serving) -> None:
        await place(serving)

    await check(monkeypatch, failing, begin)


@pytest.mark.parametrize(
    ("failing", "error"),
    [
        *((failing, None) for failing in [*HEAR_BOTH, *HEAR_THE_END, "scheduler.on_finish"]),
        *((failing, BROKEN) for failing in [*HEAR_BOTH, *HEAR_THE_END, *HEAR_FAILURES, "scheduler.on_finish"]),
    ],
)
async def test_a_placement_is_released_whatever_fails_as_it_ends(
    monkeypatch: pytest.MonkeyPatch, failing: str, error: EngineGone | None
) -> None:
    placed: list[Placed] = []

    async def end(serving: Serving) -> None:
        placed[0].end(error)

    async def begin(serving: Serving) -> None:
        placed.append(await place(serving))

    await check(monkeypatch, failing, end, before=begin)


async def test_every_listener_of_a_running_gateway_is_in_the_one_list(monkeypatch: pytest.MonkeyPatch) -> None:
    async with replicas(1) as [fake]:
        serving = await Serving.start(quick_config([fake.url]))
        try:
            at_end = [*HEAR_BOTH, *HEAR_THE_END]
            kinds = (Started, HEAR_BOTH), (Outcome.OK, at_end), (Outcome.ENGINE_GONE, [*at_end, *HEAR_FAILURES])
            for kind, names in kinds:
                named = [attrgetter(name.removesuffix(".on"))(serving) for name in names]
                assert set(map(id, serving._placements._listeners[kind])) == set(map(id, named))
        finally:
            await serving.close()
