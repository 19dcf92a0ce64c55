"""The serving room driven by a carrier that is no gateway: it places requests and reports what became of them."""

from __future__ import annotations

import asyncio
import re
import textwrap
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from gateway.fakes import FakeReplica, replicas
from preble.config import GatewayConfig, LimitsConfig
from preble.core.types import ReplicaId
from preble.core.types.life import Ended, Fact, FirstToken, Moved, Outcome, Progress
from preble.errors import (
    AnswerTooLarge,
    EngineGone,
    EngineRefused,
    NoReplicaError,
    Overloaded,
    RequestError,
    UnknownModel,
)
from preble.prompts.endpoints import COMPLETIONS
from preble.serving import FrontEnd, HeldRequest, Intake, ParsedRequest, Placed, Serving
from preble.serving.placed import LocalPlaced, Lost
from support.gateways import quick_config
from support.waiting import eventually

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "serving.md"
BODY = b'{"model": "tiny", "prompt": "hello", "max_tokens": 5}'


def config(fakes: list[FakeReplica], **changes: Any) -> GatewayConfig:
    return quick_config([fake.url for fake in fakes], **{"policy": "round_robin", **changes})


class Carrier:
    """Carries nothing: it places requests, and the test says what it saw of each."""

    def __init__(self, serving: Serving, intake: Intake) -> None:
        """`serving`: who decides. `intake`: what the carrier uses."""
        self.serving = serving
        self.intake = intake
        self.admissions = AsyncExitStack()
        self._numbers = count()

    async def parse(self, body: bytes = BODY, request_id: str = "r") -> ParsedRequest:
        return await self.intake.parse(COMPLETIONS, {}, body, request_id)

    async def place(self, request_id: str = "r") -> Placed:
        parsed = await self.admissions.enter_async_context(
            self.intake.admitted(await self.parse(request_id=request_id))
        )
        return await self.intake.place(await self.intake.tokenize(parsed), parsed.terms)

    async def settled(self) -> None:
        """Wait until everything that was reported has arrived: what is asked after it is answered after it."""
        own_id = {b"x-request-id": b"settled"}
        parsed = await self.intake.parse(COMPLETIONS, own_id, BODY, f"settled-{next(self._numbers)}")
        async with self.intake.admitted(parsed):
            pass
        await asyncio.sleep(0)

    def in_flight(self) -> dict[str, int]:
        """Requests in flight on each replica, as the scheduler counts them."""
        return {name: state.num_requests for name, state in self.serving.scheduler.snapshot().replicas.items()}

    def outcomes(self, request_id: str = "r") -> list[str | None]:
        return [decision.outcome for decision in self.serving.recent.of_request(request_id)]


@pytest.fixture(params=["in this process", "in another one"])
def decided(request: pytest.FixtureRequest) -> str:
    """Where placements are decided, as the carrier cannot see. (Here both ends of the socket are in one process.)"""
    place: str = request.param
    return place


@asynccontextmanager
async def carrier(decided: str, count: int = 2, **changes: Any) -> AsyncIterator[tuple[Carrier, list[FakeReplica]]]:
    """A carrier before live replicas; at the end nothing may be in flight."""
    async with replicas(count) as fakes, AsyncExitStack() as stack:
        settings = config(fakes, **changes)
        serving = await Serving.start(settings)
        intake: Intake = serving
        stack.push_async_callback(serving.close)
        if decided == "in another one":
            path = Path(stack.enter_context(TemporaryDirectory())) / "scheduler.sock"
            await serving.listen(path)
            intake = await FrontEnd.connect(settings, path, name="front-end-1")
            stack.push_async_callback(intake.close)
        await eventually(lambda: len(intake.replicas) == count)
        one = Carrier(serving, intake)
        async with one.admissions:
            yield one, fakes
        await eventually(lambda: (serving.num_in_flight, serving.num_admitted) == (0, 0))
        serving.scheduler.check()


async def test_the_carrier_on_the_page_carries_a_request(decided: str) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    code = code.replace("serving = await Serving.start(config)\n", "").replace("await serving.close()\n", "")
    names: dict[str, Any] = {"Progress": Progress, "COMPLETIONS": COMPLETIONS, "headers": {}, "body": BODY}
    exec("async def carry(serving):\n" + textwrap.indent(code, "    ") + "    return answer, placed\n", names)
    async with carrier(decided, 1) as (one, [fake]):
        answer, placed = await names["carry"](one.intake)
        assert msgspec.json.decode(answer)["choices"][0]["text"] == "hello:0"
        assert placed.engine.url == fake.url and fake.bodies == [BODY]


async def test_a_placement_is_followed_from_its_first_token_to_its_end(decided: str) -> None:
    async with carrier(decided, 1) as (one, [fake]):
        placed = await one.place()
        assert one.in_flight() == {fake.url: 1} and one.serving.num_in_flight == 1
        placed.report(FirstToken())
        placed.report(Progress(1))
        placed.report(Progress(5, 4))
        placed.end()
        await one.settled()
        [decision] = one.serving.recent.of_request("r")
        assert (decision.outcome, decision.output_tokens, decision.cached_tokens) == ("ok", 5, 4)
        assert decision.first_token_s is not None and one.in_flight() == {fake.url: 0}


@pytest.mark.parametrize(
    "outcomes",
    [
        (Outcome.OK, Outcome.ERROR, Outcome.ABORTED),
        (Outcome.ABORTED, Outcome.OK),
        (Outcome.ENGINE_GONE, Outcome.OK, Outcome.OK),
    ],
)
async def test_only_the_first_end_counts(decided: str, outcomes: tuple[Outcome, ...]) -> None:
    async with carrier(decided, 1) as (one, _):
        placed = await one.place()
        for outcome in outcomes:
            placed.report(Ended(outcome))
        placed.report(FirstToken())
        await one.settled()
        assert one.outcomes() == [outcomes[0]]


@pytest.mark.parametrize(
    ("error", "status", "outcome"),
    [
        (None, 200, Outcome.OK),
        (None, 404, Outcome.REJECTED),
        (None, 429, Outcome.REFUSED),
        (None, 503, Outcome.REFUSED),
        (None, 500, Outcome.ENGINE_FAILED),
        (EngineRefused("x"), 200, Outcome.ENGINE_REFUSED),
        (EngineGone("x"), 500, Outcome.ENGINE_GONE),
        (AnswerTooLarge("x"), 200, Outcome.REQUEST_ERROR),
        (TimeoutError(), 200, Outcome.ABORTED),
        (asyncio.CancelledError(), 200, Outcome.ABORTED),
        (ZeroDivisionError(), 200, Outcome.ERROR),
    ],
)
async def test_an_error_or_else_the_status_is_the_outcome(
    decided: str, error: BaseException | None, status: int, outcome: Outcome
) -> None:
    async with carrier(decided, 1) as (one, _):
        (await one.place()).end(error, status=status)
        await one.settled()
        assert one.outcomes() == [outcome]


async def test_a_failure_of_the_replica_has_it_checked_and_the_request_placed_elsewhere(decided: str) -> None:
    async with carrier(decided, 2) as (one, fakes):
        placed = await one.place()
        [failing] = [fake for fake in fakes if fake.url == placed.placement.replica_id]
        asked = failing.questions
        placed.end(EngineRefused("no connection", replica_id=failing.url))
        again = await placed.place_again()
        assert again.placement.replica_id != failing.url
        with pytest.raises(NoReplicaError):
            again.cancelled()
            await again.place_again()
        await one.settled()
        assert one.outcomes() == ["engine_refused", "aborted"]
        await eventually(lambda: failing.questions > asked)


class Heard:
    """Notes where requests are placed."""

    def __init__(self) -> None:
        self.placements: list[ReplicaId] = []

    def on(self, placed: LocalPlaced, fact: Fact, now: float) -> None:
        self.placements.append(placed.placement.replica_id)


async def test_a_carrier_may_send_the_request_elsewhere(decided: str) -> None:
    async with carrier(decided, 2) as (one, fakes):
        placed = await one.place()
        one.serving._placements.listen(heard := Heard(), Moved)
        source = placed.placement.replica_id
        [target] = [ReplicaId(fake.url) for fake in fakes if fake.url != source]
        placed.report(Moved(target))
        await one.settled()
        assert one.in_flight() == {source: 0, target: 1}
        assert heard.placements == [target], "the queue knows where the request is"
        assert (placed.placement.replica_id, placed.engine.url) == (target, target)
        with pytest.raises(NoReplicaError, match="not live"):
            placed.report(Moved(ReplicaId("http://nowhere")))
        placed.end()
        await one.settled()
        metrics = one.serving.telemetry.exposition().decode()
        assert f'preble_in_flight{{model="tiny",replica="{source}"}} 0.0' in metrics
        assert f'preble_in_flight{{model="tiny",replica="{target}"}} 0.0' in metrics


async def test_a_carrier_hears_of_a_replica_that_leaves_and_may_still_end_well(decided: str) -> None:
    async with carrier(decided, 1) as (one, [fake]):
        placed = await one.place()
        held = HeldRequest([placed])
        held.lost(Lost("a source has left", of_source=True))
        assert held.loss is None, "it is asked alone"
        await fake.stop()
        await eventually(lambda: held.loss is not None)
        assert held.loss is not None and held.loss.reason
        assert held.loss.silent_since is None, "it refuses connections, so its machine is not silent"
        assert HeldRequest([placed]).loss == held.loss, "who begins to carry it later hears of it at once"
        placed.report(FirstToken())
        placed.report(Progress(5))
        placed.end()
        await one.settled()
        [decision] = one.serving.recent.of_request("r")
        assert decision.replica_lost and decision.outcome == "ok"
        with pytest.raises(NoReplicaError):
            await one.place("another")


async def test_a_placement_lost_and_failed_can_be_placed_again_where_a_replica_is_left(decided: str) -> None:
    async with carrier(decided, 2) as (one, fakes):
        placed = await one.place()
        [failing] = [fake for fake in fakes if fake.url == placed.placement.replica_id]
        await failing.stop()
        await eventually(lambda: len(one.serving.replicas) == 1)
        placed.end(EngineGone("broken", replica_id=failing.url))
        (await placed.place_again()).end()
        await one.settled()
        assert one.outcomes() == ["engine_gone", "ok"]


async def test_each_prompt_of_a_list_is_a_request_of_its_own(decided: str) -> None:
    async with carrier(decided, 2) as (one, _):
        parsed = await one.parse(b'{"prompt": ["a", "bc"]}')
        requests = [await one.intake.tokenize(parsed, i) for i in range(parsed.num_prompts)]
        assert [(r.request_id, r.num_prompt_tokens) for r in requests] == [("r#0", 1), ("r#1", 2)]
        async with one.intake.admitted(parsed) as parsed:
            for request in requests:
                (await one.intake.place(request, parsed.terms)).end()


async def test_admission_ids_and_errors_are_the_same_without_endy_carrier(decided: str) -> None:
    async with carrier(decided, 1, limits=LimitsConfig(max_in_flight=1)) as (one, _):
        async with one.intake.admitted(await one.parse()) as parsed:
            placed = await one.intake.place(await one.intake.tokenize(parsed), parsed.terms)
            with pytest.raises(Overloaded):
                await one.place("another")
            placed.end()
        with pytest.raises(RequestError):
            await one.parse(b"no JSON")
        other = await one.parse(b'{"model": "unknown", "prompt": "a"}')
        with pytest.raises(UnknownModel):
            await one.intake.tokenize(other)
        mine = {b"x-request-id": b"mine"}
        with one.intake.ids.taken(mine) as first, one.intake.ids.taken(mine) as second:
            assert first == "mine" != second


async def test_a_carrier_that_is_cancelled_ends_its_placement(decided: str) -> None:
    async with carrier(decided, 1) as (one, _):
        placed = await one.place()

        async def carry() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                placed.end(error)
                raise

        task = asyncio.create_task(carry())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await one.settled()
        assert one.outcomes() == ["aborted"]
