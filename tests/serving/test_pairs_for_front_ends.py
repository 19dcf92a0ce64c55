"""Front ends ask both replicas of a pair that the scheduler process has chosen, and report which of them failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock

import msgspec
import pytest

from preble.config import GatewayConfig, ParityConfig, ReplicaConfig, TimeoutsConfig
from preble.core.types import LONGEST_KV_LEASE_S, ReplicaId, Role
from preble.core.types.life import Lost, Moved
from preble.emulator import EmulatorConfig, EmulatorServer
from preble.engines.pairs import PairedEngine
from preble.errors import EngineError, EngineGone, NoReplicaError, RequestError
from preble.prompts.endpoints import COMPLETIONS, ENDPOINTS
from preble.rules.callers import Caller
from preble.serving import FrontEnd, Placed, Serving
from support.waiting import eventually

BODY = msgspec.json.encode({"prompt": list(range(1, 326)), "max_tokens": 4})
A6000 = "a6000-mistral-7b"


@asynccontextmanager
async def front_of(folder: Path, *roles: str) -> AsyncIterator[tuple[Serving, FrontEnd, list[EmulatorServer]]]:
    async with AsyncExitStack() as stack:
        emulated = [EmulatorConfig(profile=A6000, speed=50.0, role=Role(role)) for role in roles]
        servers = [await stack.enter_async_context(EmulatorServer(one)) for one in emulated]
        config = GatewayConfig(
            replicas=tuple(ReplicaConfig(server.url, engine="sglang") for server in servers),
            parity=ParityConfig(enabled=False),
            timeouts=TimeoutsConfig(no_replica_wait_s=0.0),
        )
        serving = await Serving.start(config)
        stack.push_async_callback(serving.close)
        await serving.listen(folder / "socket")
        front_end = await FrontEnd.connect(config, folder / "socket", name="front-end-1", share=1)
        stack.push_async_callback(front_end.close)
        await eventually(lambda: len(front_end.replicas) == len(roles), "all have joined")
        yield serving, front_end, servers
        await eventually(lambda: serving.num_in_flight == 0, "nothing is left in flight")
        serving.scheduler.check()


@asynccontextmanager
async def placed_by(front_end: FrontEnd) -> AsyncIterator[Placed]:
    parsed = await front_end.parse(COMPLETIONS, {}, BODY, "r")
    async with front_end.admitted(parsed) as parsed:
        yield await front_end.place(await front_end.tokenize(parsed), parsed.terms)


async def status_of(placed: Placed) -> int:
    async with placed.engine.send(COMPLETIONS.path, BODY, {}) as answer:
        async for _ in answer.chunks():
            pass
    return answer.status


async def test_a_front_end_asks_the_pair_and_is_answered(tmp_path: Path) -> None:
    async with front_of(tmp_path, "prefill", "decode") as (_, front_end, servers), placed_by(front_end) as placed:
        assert isinstance(placed.engine, PairedEngine)
        assert (placed.placement.prefill_source, placed.placement.replica_id) == (servers[0].url, servers[1].url)
        assert await status_of(placed) == 200
        placed.end()


async def test_what_failed_is_avoided_and_only_that(tmp_path: Path) -> None:
    roles = ("prefill", "prefill", "decode")
    async with front_of(tmp_path, *roles) as (_, front_end, servers), placed_by(front_end) as placed:
        source = next(server for server in servers if server.url == placed.placement.prefill_source)
        await source.__aexit__(None, None, None)
        with pytest.raises(EngineError) as failure:
            await status_of(placed)
        placed.end(failure.value)
        assert placed.blamed == source.url
        again = await placed.place_again()
        assert again.placement.replica_id == placed.placement.replica_id
        assert again.placement.prefill_source not in (None, source.url)
        assert await status_of(again) == 200
        again.end()


async def test_a_front_end_hears_that_a_source_has_left(tmp_path: Path) -> None:
    async with (
        front_of(tmp_path, "prefill", "decode") as (serving, front_end, servers),
        placed_by(front_end) as placed,
    ):
        placed.carried_by(Deaf())
        serving._placements.lose(ReplicaId(servers[0].url), [], Lost("it is silent"))
        pair = placed.engine
        assert isinstance(pair, PairedEngine)
        await eventually(lambda: pair._loss is not None)
        with pytest.raises(EngineGone):
            await status_of(placed)
        placed.end()


async def test_what_becomes_of_a_transfer_is_told_to_the_scheduler(tmp_path: Path) -> None:
    async with front_of(tmp_path, "prefill", "decode") as (serving, front_end, _), placed_by(front_end) as placed:
        placed.carried_by(Deaf())
        assert await status_of(placed) == 200
        placed.end()
        newest = next(iter(serving.recent.latest(1)))
        await eventually(lambda: next(iter(serving.recent.latest(1))).transferred_s is not None, str(newest))


class Deaf:
    """A carrier that has heard nothing of the answer."""

    heard_at: float | None = None

    def lost(self, loss: Lost) -> None:
        """It is told to the pair."""


async def test_a_front_end_whose_scheduler_is_away_makes_pairs_itself(tmp_path: Path) -> None:
    async with front_of(tmp_path, "prefill", "decode") as (serving, front_end, _):
        assert serving._socket is not None
        serving._socket.close()
        await eventually(lambda: not front_end.is_led, "the scheduler is away")
        async with placed_by(front_end) as placed:
            assert isinstance(placed.engine, PairedEngine)
            assert await status_of(placed) == 200
            placed.end()


async def test_who_carries_the_bytes_elsewhere_gets_no_pair(tmp_path: Path) -> None:
    async with front_of(tmp_path, "prefill", "decode") as (serving, _, _):
        parsed = await serving.parse(COMPLETIONS, {}, BODY, "r")
        async with serving.admitted(parsed) as parsed:
            with pytest.raises(NoReplicaError, match="only decodes"):
                await serving.place_together(parsed)


async def test_a_request_that_its_carrier_has_moved_has_no_transfer_and_no_prediction(tmp_path: Path) -> None:
    async with front_of(tmp_path, "prefill", "decode", "decode") as (serving, _, servers):
        parsed = await serving.parse(COMPLETIONS, {}, BODY, "r")
        async with serving.admitted(parsed) as parsed:
            placed = await serving.place(await serving.tokenize(parsed), parsed.terms)
            before = replace(placed.placement, predicted_ttft_p98_s=2.0, predicted_tpot_p98_s=0.1)
            assert before.transfer is not None and before.predicted_ttft_s is not None
            placed.placement = before
            [other] = [server.url for server in servers[1:] if server.url != before.replica_id]
            placed.report(Moved(ReplicaId(other)))
            after = placed.placement
            assert (after.replica_id, after.transfer, after.prefill_source) == (other, None, None)
            assert placed.engine.url == other and not isinstance(placed.engine, PairedEngine)
            predicted = (after.predicted_ttft_s, after.predicted_ttft_p98_s)
            assert (*predicted, after.predicted_tpot_s, after.predicted_tpot_p98_s) == (None,) * 4
            placed.end()


async def test_who_can_go_on_with_a_response_is_judged_once_its_holder_has_been_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask all replicas takes a while: meanwhile the holder has come back as one that computes prompts itself."""
    async with front_of(tmp_path, "prefill", "decode") as (serving, _, servers):
        url = ReplicaId(servers[1].url)

        async def holder(response_id: str, caller: Caller) -> ReplicaId:
            replica = serving.replicas[url]
            replica.info = replace(replica.info, spec=replace(replica.info.spec, answers_alone=True))
            serving.replicas.hold_back(frozenset())  # the table has changed
            return url

        body = msgspec.json.encode({"input": "And the dog?", "previous_response_id": "resp_1"})
        parsed = await serving.parse(ENDPOINTS["/v1/responses"], {}, body, "r")
        with pytest.raises(RequestError, match="send the whole"):
            monkeypatch.setattr(serving.stored, "holder", AsyncMock(return_value=url))
            await serving.tokenize(parsed)
        monkeypatch.setattr(serving.stored, "holder", holder)
        request = await serving.tokenize(parsed)
        assert url not in request.avoid


@pytest.mark.parametrize(
    ("status", "lease_s", "is_kept"),
    [(503, 20.0, True), (500, 20.0, True), (500, 1e12, True), (400, 20.0, False), (200, 20.0, False)],
)
async def test_the_scheduler_hears_of_what_a_target_that_fails_or_refuses_never_fetches(
    tmp_path: Path, status: int, lease_s: float, is_kept: bool
) -> None:
    """However long its source says that it keeps it. Of a request that is at fault the target tells the source."""
    async with front_of(tmp_path, "prefill", "decode") as (serving, front_end, _), placed_by(front_end) as placed:
        assert isinstance(placed.engine, PairedEngine)
        placed.engine.kept_until = asyncio.get_running_loop().time() + lease_s
        placed.end(status=status)
        await eventually(lambda: serving.num_in_flight == 0)
        assert next(iter(serving.recent.latest(1))).transfer_failed is is_kept
        longest_s = max((use.until for use in serving.scheduler._in_flight._tracker._kept), default=0.0)
        left_s = longest_s - asyncio.get_running_loop().time()
        assert left_s <= LONGEST_KV_LEASE_S and (not is_kept or left_s > 1.0)
