"""The tables of a request's states: requests take every step that they have, and no other."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from gateway.conftest import Serve, Served, Steps
from gateway.fakes import die_after, die_before, die_before_body, die_midway, gated, gated_stream, replicas
from preble.config import LimitsConfig
from preble.gateway.requests.states import ENDS, NEXT, AttemptState, RequestState
from preble.web.server.connection import ClientConnection
from support.waiting import eventually

pytestmark = pytest.mark.plain


async def asked(gateway: Served, **fields: Any) -> None:
    """The request has been answered, well or not."""
    async with gateway.http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", **fields}) as answer:
        await answer.read()


def test_each_state_but_the_first_follows_another_and_each_but_the_ends_has_one_that_follows() -> None:
    followers = {after for steps in NEXT.values() for after in steps}
    assert NEXT.keys() == {*RequestState, *AttemptState}
    assert NEXT.keys() - followers == {RequestState.READING, AttemptState.SENT}
    assert {state for state, after in NEXT.items() if not after} == ENDS
    assert all(RequestState.OVER in NEXT[state] for state in RequestState if state not in ENDS)


async def test_requests_take_every_step_of_the_tables_and_no_other(
    serve: Serve, steps_taken: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(1) as [one], serve([one], limits=LimitsConfig(max_body_bytes=1000)) as gateway:
        await asked(gateway)
        await asked(gateway, stream=True)
        await asked(gateway, prompt=["one", "two"])
        await asked(gateway, prompt=7)
        await asked(gateway, prompt="x" * 2000)
        for behaviour, streams in (
            (die_before, False),
            (die_midway, False),
            (die_before_body, True),
            (die_after, True),
        ):
            one.script += [behaviour, behaviour]
            one.gate.set()
            await asked(gateway, stream=streams)
            one.gate.clear()
            one.script.clear()
        for behaviour, streams in ((gated, False), (gated_stream, True)):
            one.script.append(behaviour)
            waiting = asyncio.create_task(asked(gateway, stream=streams))
            await eventually(lambda: one.running == 1)
            waiting.cancel()
            await gateway.idle()
            await eventually(lambda: one.running == 0)
        await slow_reader(gateway, monkeypatch)
    drawn = {(state, after) for state, following in NEXT.items() for after in following}
    assert {*steps_taken} == drawn


async def slow_reader(gateway: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that read nothing of their answers: from a replica, and from the gateway itself."""

    async def answered(*_: Any) -> bytes:
        return b"{}"

    with monkeypatch.context() as patch:
        patch.setattr(ClientConnection, "is_write_paused", True)
        patch.setattr(gateway.gateway.serving, "answer_here", answered)
        for path in ("/v1/completions", "/tokenize"):
            async with (
                aiohttp.ClientSession(gateway.gateway.url) as http,
                http.post(path, json={"model": "tiny", "prompt": "hello"}) as answer,
            ):
                assert answer.status == 200
    await gateway.idle()
