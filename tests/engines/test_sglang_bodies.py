"""What SGLang gets of a body that names an adapter: it ignores `model`, so the adapter has to be named apart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.test_http import ANSWER, Peer, client_of, serving
from preble.engines.reporting import RankEngine
from preble.engines.sglang.bodies import num_answers, with_adapter, with_request_id, without_stream
from preble.engines.sglang.client import SglangEngine


async def answers(peer: Peer, _: int) -> None:
    await peer.request()
    await peer.answer(ANSWER)


@pytest.mark.parametrize("of_rank", [False, True])
async def test_a_request_for_a_loaded_adapter_names_it_apart(of_rank: bool) -> None:
    async with serving(answers) as server, client_of(server.url) as client:
        engine = SglangEngine(client)
        asked = RankEngine(engine, 1) if of_rank else engine
        asked.adapters = ("sql",)
        async with asked.send("/v1/completions", b'{"model": "sql", "prompt": "a"}', {}) as response:
            assert b"".join([chunk async for chunk in response.chunks()]) == b"ok"
        sent = json.loads(server.peers[0].requests[0].partition(b"\r\n\r\n")[2])
        assert (sent["model"], sent["lora_path"]) == ("sql", "sql")


@pytest.mark.parametrize(
    "body",
    [
        {"model": "tiny", "prompt": "a"},
        {"prompt": "a"},
        {"model": "sql", "lora_path": "other"},
        {"model": ["sql"]},
        ["sql"],
        {},
    ],
)
def test_any_other_body_stays_as_it_is(body: Any) -> None:
    encoded = json.dumps(body).encode()
    assert with_adapter(encoded, ("sql",)) == encoded


DEEP = b'{"model": "sql", "stream": true, "n": 2, "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize("body", [b'{"model": "sql", "stream"', DEEP], ids=["cut off", "too deep"])
def test_what_cannot_be_read_stays_as_it_is(body: bytes) -> None:
    assert with_adapter(body, ("sql",)) == body
    assert with_request_id(body, "id") is None
    assert num_answers(body) == 1
    assert without_stream(body) == body
