"""Peers that keep to no rule, against a picker that runs as its users start it, with its default settings."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from h2.errors import ErrorCodes
from hyperframe.frame import ContinuationFrame, HeadersFrame, PingFrame, PriorityFrame, SettingsFrame, WindowUpdateFrame

from gateway.fakes import replicas
from picker.gateway_by_hand import header_map
from picker.hostile_peer import (
    CHECK,
    PROCESS,
    WATCH,
    HostilePeer,
    data,
    headers,
    message,
    opened,
    peers,
    reset,
)
from preble.engines.starting.commands import Command
from preble.engines.starting.launch import ReplicaProcess
from preble.engines.starting.ports import free_ports
from preble.picker.calls import MOST_CONNECTIONS, MOST_HELD_BYTES
from preble.picker.envoy import pb
from preble.picker.http2 import MOST_EARLY_RESETS, MOST_IDLE_FRAMES, MOST_STREAMS
from preble.picker.server import MOST_WATCHES
from support.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")]

MOST_GROWTH_BYTES = 1.4 * MOST_HELD_BYTES
"""What the picker's memory may grow by: what it counts as held, and what a process needs beside it."""
CALM = ErrorCodes.ENHANCE_YOUR_CALM
HEAD = pb.ProcessingRequest(
    request_headers=pb.HttpHeaders(headers=header_map({":method": "POST", ":path": "/v1/completions"}))
).SerializeToString()


class Attacked:
    """A picker in a process of its own."""

    def __init__(self, process: ReplicaProcess, port: int) -> None:
        self.port = port
        self._process = process
        self._started_with = self.resident

    @property
    def resident(self) -> int:
        """Bytes of memory that it has."""
        text = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        return 1024 * int(re.findall(r"VmRSS:\s+(\d+)", text)[0])

    @property
    def growth(self) -> int:
        return self.resident - self._started_with

    @property
    def log(self) -> str:
        return self._process.log_path.read_text(encoding="utf-8")

    async def refusals(self, reason: str) -> float:
        async with aiohttp.ClientSession() as http, http.get(f"{self._process.url}/metrics") as answer:
            found = re.findall(rf'^preble_picker_refusals_total{{reason="{reason}"}} (\S+)$', await answer.text(), re.M)
        return sum(map(float, found))

    async def answers_others(self) -> bool:
        """Whether a peer that comes now is told the health."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options) as channel:
            answer = await HealthStub(channel).Check(HealthCheckRequest(), timeout=PATIENCE_S)
        return bool(answer.status == HealthCheckResponse.SERVING)


@asynccontextmanager
async def attacked(folder: Path) -> AsyncIterator[Attacked]:
    """A picker. At the end it answers others, its memory is bounded, and its log has no traceback."""
    async with AsyncExitStack() as stack:
        [fake] = await stack.enter_async_context(replicas(1))
        port, grpc_port = free_ports(2)
        argv = (sys.executable, "-m", "preble", "epp", "--replica", fake.url)
        argv += ("--port", str(port), "--grpc-port", str(grpc_port))
        process = ReplicaProcess("picker", Command(argv, dict(os.environ), port), folder / "picker.log")
        stack.push_async_callback(process.stop)
        await process.start()
        await process.wait_ready(PATIENCE_S)
        found = Attacked(process, grpc_port)
        yield found
        assert await found.answers_others()
        assert found.growth < MOST_GROWTH_BYTES, f"grew by {found.growth} bytes"
        assert "Traceback" not in found.log


async def left(peer: HostilePeer) -> int | None:
    """Wait until the picker has closed the connection; return the code that it gave."""
    await eventually(lambda: peer.is_closed, "the picker leaves")
    return peer.goaway


async def test_streams_that_are_reset_as_soon_as_they_are_opened_end_the_connection(tmp_path: Path) -> None:
    async with attacked(tmp_path) as picker:
        for _ in range(5):
            async with peers(picker.port, 1) as [peer]:
                await peer.send(opened(number) + reset(number) for number in range(1, 6 * MOST_EARLY_RESETS, 2))
                assert await left(peer) in (CALM, None), "it may be gone before we have read why"
        assert await picker.refusals("flood") == 5


async def test_unfinished_messages_stay_within_the_budget_and_their_memory_is_used_again(tmp_path: Path) -> None:
    frame = message(bytes(15_000), length=2**20)

    def beginnings() -> Iterator[bytes]:
        for number in range(1, 2 * MOST_STREAMS, 2):
            yield opened(number) + data(number, frame)

    async with attacked(tmp_path) as picker:
        for _ in range(2):
            async with peers(picker.port, 6) as found:
                await eventually(lambda: all(peer.is_greeted for peer in found))
                await asyncio.gather(*(peer.send(beginnings()) for peer in found))
                assert await picker.answers_others()
                await eventually(lambda: any(peer.is_closed for peer in found))
                assert picker.growth < MOST_GROWTH_BYTES
        assert await picker.refusals("memory") > 0


async def test_requests_that_begin_and_go_on_with_nothing_stay_within_the_budget(tmp_path: Path) -> None:
    def beginnings() -> Iterator[bytes]:
        for number in range(1, 2 * MOST_STREAMS, 2):
            yield opened(number) + data(number, message(HEAD))

    async with attacked(tmp_path) as picker, peers(picker.port, 8) as found:
        await asyncio.gather(*(peer.send(beginnings()) for peer in found))
        await eventually(lambda: any(peer.is_closed for peer in found))
        assert await picker.answers_others()


async def test_a_message_that_is_too_long_ends_its_call_and_no_other(tmp_path: Path) -> None:
    async with attacked(tmp_path) as picker, peers(picker.port, 1) as [peer]:
        await peer.send(opened(1) + data(1, message(b"", length=16 * 1024 * 1024 - 1)))
        await eventually(lambda: 1 in peer.statuses)
        assert peer.statuses[1] == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        await peer.send(opened(3, CHECK) + data(3, message(b""), ends=True))
        await eventually(lambda: peer.statuses.get(3) == 0)


async def test_bytes_that_are_no_message_are_the_callers_fault_and_fill_no_log(tmp_path: Path) -> None:
    count = 500
    async with attacked(tmp_path) as picker, peers(picker.port, 1) as [peer]:
        await peer.send(opened(n) + data(n, message(b"\xff" * 5), ends=True) for n in range(1, 2 * count, 2))
        await eventually(lambda: len(peer.statuses) == count)
        assert set(peer.statuses.values()) == {grpc.StatusCode.INVALID_ARGUMENT.value[0]}
        assert await picker.refusals("message") == count
        assert picker.log.count("call_refused") == 1


@pytest.mark.parametrize(
    "nothing",
    [
        PingFrame(0, b"12345678").serialize(),
        SettingsFrame(0, {3: 1}).serialize(),
        PriorityFrame(3).serialize(),
        WindowUpdateFrame(0, window_increment=1).serialize(),
        data(1, b""),
    ],
    ids=["pings", "settings", "priorities", "updates of windows", "empty data"],
)
async def test_frames_that_carry_nothing_end_the_connection(tmp_path: Path, nothing: bytes) -> None:
    async with attacked(tmp_path) as picker, peers(picker.port, 1) as [peer]:
        await peer.send([opened(1), *[nothing * MOST_IDLE_FRAMES] * 3])
        assert await left(peer) in (CALM, None)
        assert await picker.refusals("flood") == 1


async def test_headers_that_go_on_without_end_end_the_connection(tmp_path: Path) -> None:
    more = ContinuationFrame(1, bytes(16_000)).serialize()
    async with attacked(tmp_path) as picker, peers(picker.port, 3) as found:
        for peer in found:
            await peer.send([HeadersFrame(1, headers(), flags=[]).serialize(), *[more] * 50])
            assert await left(peer) in (CALM, ErrorCodes.PROTOCOL_ERROR, None)  # by who sees it first, h2 or we
        assert await picker.refusals("flood") + await picker.refusals("protocol") == 3


async def test_a_header_list_that_is_too_large_ends_the_connection(tmp_path: Path) -> None:
    added = b"\x40\x01a\x7f" + b"\xa1\x1e" + bytes(4000)
    referred = HeadersFrame(1, headers() + added + 1000 * b"\xbe", flags=["END_HEADERS"]).serialize()
    async with attacked(tmp_path) as picker, peers(picker.port, 1) as [peer]:
        await peer.send(referred)
        assert await left(peer) is not None
        assert await picker.refusals("protocol") + await picker.refusals("flood") == 1


async def test_connections_that_send_nothing_make_room_for_others_and_are_closed(tmp_path: Path) -> None:
    async with attacked(tmp_path) as picker:
        async with peers(picker.port, 2 * MOST_CONNECTIONS, greet=False) as found:
            assert await picker.answers_others()
            await eventually(lambda: sum(peer.is_closed for peer in found) >= MOST_CONNECTIONS)
            await eventually(lambda: all(peer.is_closed for peer in found), "greetings are waited for")
        assert await picker.refusals("silent") > 0 and await picker.refusals("connections") > 0


async def test_a_connection_that_is_used_is_not_closed_for_others(tmp_path: Path) -> None:
    async with attacked(tmp_path) as picker, peers(picker.port, 1) as [used]:
        await used.send(opened(1, WATCH) + data(1, message(b"")))
        async with peers(picker.port, 2 * MOST_CONNECTIONS):
            assert await picker.answers_others()
        await used.send(opened(3, CHECK) + data(3, message(b""), ends=True))
        await eventually(lambda: used.statuses.get(3) == 0)


async def test_a_connection_may_watch_the_health_a_few_times_at_once(tmp_path: Path) -> None:
    count = 300
    async with attacked(tmp_path) as picker, peers(picker.port, 1) as [peer]:
        await peer.send(opened(n, WATCH) + data(n, message(b""), ends=True) for n in range(1, 2 * count, 2))
        await eventually(lambda: len(peer.statuses) == count - MOST_WATCHES)
        assert set(peer.statuses.values()) == {grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]}


async def test_a_call_without_a_message_is_ended(tmp_path: Path) -> None:
    async with attacked(tmp_path) as picker, peers(picker.port, 1) as [peer]:
        for number, path in ((1, PROCESS), (3, CHECK), (5, WATCH)):
            await peer.send(opened(number, path))
        await eventually(lambda: len(peer.statuses) == 3)
        assert set(peer.statuses.values()) == {grpc.StatusCode.DEADLINE_EXCEEDED.value[0]}


async def test_a_peer_that_speaks_http_1_is_left_at_once(tmp_path: Path) -> None:
    async with attacked(tmp_path) as picker, peers(picker.port, 1, greet=False) as [peer]:
        await peer.send(b"GET / HTTP/1.1\r\nhost: picker\r\n\r\n")
        await left(peer)
        assert await picker.refusals("protocol") == 1
