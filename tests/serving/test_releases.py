"""Whatever fails as a placement begins or ends, everything lets go of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import product
from operator import attrgetter
from typing import Any

import pytest

from gateway.fakes import replicas
from preble.core.types import ReplicaId
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
        return await serving.place(await serving.tokenize(parsed), parsed)


def assert_released(serving: Serving, replica: str) -> None:
    placements = serving._placements
    assert placements.in_flight == {}
    assert serving.scheduler.snapshot().replicas[ReplicaId(replica)].num_requests == 0
    assert placements.ejection._replicas[ReplicaId(replica)].running == {}
    assert serving._turns.admission._running == {}
    serving.scheduler.check()


async def check(
    monkeypatch: pytest.MonkeyPatch, failing: str, begin_and_end: Callable[[Serving], Awaitable[None]]
) -> None:
    """While the method at this path below `Serving` fails, a placement begins and ends; afterwards all goes well."""
    async with replicas(1) as [fake]:
        serving = await Serving.start(quick_config([fake.url], policy="round_robin"))
        try:
            await eventually(lambda: len(serving.replicas) == 1)
            path, _, method = failing.rpartition(".")
            with monkeypatch.context() as patch:
                part = attrgetter(path)(serving)
                patch.setattr(part, method, fails_afterwards(getattr(part, method)))
                with pytest.raises(ZeroDivisionError):
                    await begin_and_end(serving)
                assert_released(serving, fake.url)
            (await place(serving)).end()
            assert_released(serving, fake.url)
        finally:
            await serving.close()


BEGINS = ["scheduler.next_timer", "recent.placed", "telemetry.placed", "_placements.ejection.sent", "_turns.placed"]


@pytest.mark.parametrize("failing", BEGINS)
async def test_a_placement_that_fails_as_it_begins_is_released(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    async def begin(serving: Serving) -> None:
        await place(serving)

    await check(monkeypatch, failing, begin)


OF_ENDS = ["scheduler.on_finish", "telemetry.finished", "_turns.ended"]
OF_GOOD_ENDS = [*OF_ENDS, "_placements.ejection.succeeded"]
OF_FAILURES = [*OF_ENDS, "_placements.ejection.failed", "telemetry.engine_failed", "replicas.suspect"]


@pytest.mark.parametrize(
    ("failing", "error"),
    [*product(OF_GOOD_ENDS, [None]), *product(OF_FAILURES, [EngineGone("broken")])],
)
async def test_a_placement_is_released_whatever_fails_as_it_ends(
    monkeypatch: pytest.MonkeyPatch, failing: str, error: EngineGone | None
) -> None:
    async def begin_and_end(serving: Serving) -> None:
        placed = await place(serving)
        if error is None:
            placed.end()
        else:
            placed.failed(error)

    await check(monkeypatch, failing, begin_and_end)
