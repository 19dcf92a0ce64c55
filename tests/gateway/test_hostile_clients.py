"""Clients that take memory: bodies that stay, answers that are not read."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from contextlib import suppress

import pytest

from gateway.conftest import Serve
from gateway.fakes import gated, replicas, rubbish
from preble.config import LimitsConfig, TimeoutsConfig
from preble.errors import Overloaded
from preble.gateway.http import bodies
from preble.gateway.http.bodies import BodyMemoryBudget
from support.waiting import eventually


def test_room_that_is_taken_is_given_back_at_the_end_whatever_happens() -> None:
    room = BodyMemoryBudget(100, retry_after_s=2.0)
    with room.share() as one:
        one.grow(60)
        with pytest.raises(Overloaded) as refusal, room.share() as two:
            two.grow(40)
            two.grow(1)
        assert room.held == 60
    assert (room.held, refusal.value.retry_after_s) == (0, 2.0)


def test_failing_requests_cannot_keep_the_garbage_collector_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    collections: list[float] = []

    def collect() -> None:
        collections.append(clock[0])
        clock[0] += 1.0

    clock = [0.0]
    monkeypatch.setattr(bodies.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(bodies.gc, "collect", collect)
    room = BodyMemoryBudget(800, retry_after_s=1.0)
    while clock[0] < 50.0:
        with suppress(ValueError), room.share() as one:
            one.grow(101)
            raise ValueError
        room.collect()
        clock[0] += 0.5
    assert collections == pytest.approx([0.0, 21.0, 42.0], abs=1.5)


async def test_bodies_of_all_clients_together_are_bounded(serve: Serve) -> None:
    limits = LimitsConfig(max_body_bytes=100_000)
    async with replicas(1) as [one], serve([one], limits=limits) as gateway:
        one.script.extend([gated] * 17)
        large = {"prompt": [1], "user": "u" * 99_000}
        running = [asyncio.create_task(gateway.complete(**large)) for _ in range(16)]
        await eventually(lambda: one.running == 16)
        assert re.search(r"^preble_body_bytes 1\.?5", await gateway.metrics(), re.MULTILINE)
        code, body, headers = await gateway.complete(**large)
        assert (code, body["error"]["code"], headers["retry-after"]) == (429, "overloaded", "1")
        one.gate.set()
        assert {code for code, _, _ in await asyncio.gather(*running)} == {200}

        async def nothing_is_held() -> bool:
            """A request may end after its client has the answer."""
            return "preble_body_bytes 0.0" in await gateway.metrics()

        await eventually(nothing_is_held)
        assert (await gateway.complete(**large))[0] == 200


async def test_a_large_answer_that_is_not_read_counts_as_being_served_until_it_is(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        large = json.dumps({"choices": [{"index": 0, "text": "a" * 20_000_000}]}).encode()
        one.script.append(rubbish(large, "application/json"))
        body = json.dumps({"prompt": [1]}).encode()
        with socket.create_connection(("127.0.0.1", int(gateway.gateway.url.rpartition(":")[2]))) as lazy:
            lazy.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await eventually(lambda: len(one.requests) == 1 and gateway.gateway.serving.num_in_flight == 0)
            await gateway.metrics()
            assert gateway.gateway.serving.num_admitted == 1
            received = await asyncio.to_thread(_read, lazy, 20_000_000)
        assert received >= 20_000_000
        await gateway.idle()
        assert 'status="200"} 1.0' in await gateway.metrics()


async def test_a_client_that_reads_nothing_leaves_no_traceback_when_the_gateway_ends(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    at_once = TimeoutsConfig(shutdown_s=0.0)
    async with replicas(1) as [one], serve([one], timeouts=at_once) as gateway:
        one.script.append(rubbish(b"data: {}\n\n" * 4_000_000, "text/event-stream"))
        body = b'{"prompt": [1], "stream": true}'
        with socket.create_connection(("127.0.0.1", int(gateway.gateway.url.rpartition(":")[2]))) as lazy:
            lazy.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await eventually(lambda: gateway.gateway.serving.num_in_flight == 1)
            await gateway.stop()
    assert [record for record in caplog.records if record.exc_info] == []


def _read(peer: socket.socket, least: int) -> int:
    received = 0
    while received < least:
        received += len(peer.recv(1 << 20))
    return received
