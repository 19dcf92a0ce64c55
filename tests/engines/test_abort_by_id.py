"""SGLang hears at once, by the request's id, that nobody waits for an answer any more."""

from __future__ import annotations

import asyncio
import json

import pytest

from engines.test_http import ANSWER, CHUNKED, FOREVER, Peer, client_of, serving
from preble.engines.sglang.client import SglangEngine
from support.waiting import eventually


def told(peers: list[Peer]) -> list[str]:
    """The ids that the server was told to abort."""
    requests = [request for peer in peers for request in peer.requests]
    return [json.loads(r.partition(b"\r\n\r\n")[2])["rid"] for r in requests if r.startswith(b"POST /abort_request ")]


@pytest.mark.parametrize("sent", [b"", CHUNKED + b"2\r\nhi\r\n"], ids=["before its answer", "within its answer"])
async def test_a_request_that_is_left_is_aborted_by_its_id(sent: bytes) -> None:
    async def slow(peer: Peer, _: int) -> None:
        if (await peer.request()).startswith(b"POST /abort_request "):
            await peer.answer(ANSWER)
        else:
            await peer.answer(sent)
            await asyncio.sleep(FOREVER)

    async with serving(slow) as server, client_of(server.url) as client:
        asking = asyncio.create_task(read(SglangEngine(client)))
        await eventually(lambda: bool(server.peers and server.peers[0].requests))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: len(told(server.peers)) == 1)
        [asked] = [json.loads(r.partition(b"\r\n\r\n")[2]) for r in server.peers[0].requests]
        assert told(server.peers) == [asked["rid"]]


async def test_a_request_that_is_answered_is_not_aborted() -> None:
    async def answers(peer: Peer, _: int) -> None:
        while True:
            await peer.request()
            await peer.answer(ANSWER)

    async with serving(answers) as server, client_of(server.url) as client:
        assert await read(SglangEngine(client)) == await read(SglangEngine(client)) == b"ok"
        assert told(server.peers) == [] and len(server.peers) == 1


async def test_what_generates_nothing_goes_as_it_is() -> None:
    """SGLang refuses one id for several texts to embed."""

    async def answers(peer: Peer, _: int) -> None:
        await peer.request()
        await peer.answer(ANSWER)

    async with serving(answers) as server, client_of(server.url) as client:
        body = b'{"input": ["a", "b"]}'
        assert await read(SglangEngine(client), "/v1/embeddings", body) == b"ok"
        assert server.peers[0].requests[0].endswith(body)


async def read(engine: SglangEngine, path: str = "/v1/completions", body: bytes = b'{"prompt": "a"}') -> bytes:
    async with engine.send(path, body, {}) as response:
        return b"".join([chunk async for chunk in response.chunks()])
