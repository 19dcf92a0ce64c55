"""The subscriber's side of ZMQ's protocol, with every kind of peer; streams of real publishers: test_kv_events.py."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import ExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from random import Random

import pytest
import uvloop
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from preble.core.types import EventsLost, ReplicaId
from preble.engines.kv_events.sockets import KvEventEndpoints, KvMessage, ReplayUnavailable, replayed
from preble.engines.kv_events.stream import KvEventStream
from preble.engines.kv_events.subscription import QUEUED_MESSAGES, Subscription
from preble.engines.kv_events.zmtp import GREETING, NotZmtp, subscriber
from support.waiting import PATIENCE_S, eventually

MAX_BYTES = 5_000
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
ROUTER_READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"
LONG_BODY = bytes(range(250)) * 4
MESSAGE = b"\x01\x05topic\x01\x08" + (7).to_bytes(8, "big") + b"\x02" + len(LONG_BODY).to_bytes(8, "big") + LONG_BODY
PING, PONG = b"\x04\x1a\x04PING\x00\x96sixteen bytes of it", b"\x04\x15\x04PONGsixteen bytes of"


def on_rubbish() -> None:
    pytest.fail("a message was taken for rubbish")


def test_the_pieces_in_which_bytes_arrive_make_no_difference() -> None:
    sent = GREETING + READY + MESSAGE + PING + MESSAGE
    for size in (1, 2, 3, 7, 64, 100, len(sent)):
        peer = subscriber(b"topic", MAX_BYTES)
        messages, answer = [], b""
        for at in range(0, len(sent), size):
            whole, more = peer.feed(sent[at : at + size])
            messages += whole
            answer += more
        assert messages == [[b"topic", (7).to_bytes(8, "big"), LONG_BODY]] * 2
        assert answer == b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB" + b"\x00\x06\x01topic" + PONG


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "greet"),
        (GREETING[:10] + b"\x02" + GREETING[11:], "version"),
        (GREETING[:12] + b"CURVE".ljust(20, b"\0") + GREETING[32:], "authentication"),
        (GREETING + b"\x04\x0e\x05ERROR\x07go away", "go away"),
        (GREETING + READY.replace(b"PUB", b"REP"), "not PUB"),
        (GREETING + MESSAGE, "handshake"),
        (GREETING + READY + b"\x08\x01x", "flags 8"),
        (GREETING + READY + b"\x02" + (MAX_BYTES + 1).to_bytes(8, "big"), "5001 bytes"),
        (GREETING + READY + b"\x01\x00" * 1_000, "too many bytes"),
    ],
)
def test_a_peer_that_is_no_publisher_is_refused(sent: bytes, reason: str) -> None:
    with pytest.raises(NotZmtp, match=reason):
        subscriber(b"", MAX_BYTES).feed(sent)


def test_rubbish_raises_nothing_else_and_fills_no_memory() -> None:
    rng = Random(0)
    for _ in range(300):
        peer = subscriber(b"", MAX_BYTES)
        sent = bytearray(GREETING + READY + MESSAGE * 3)
        for _ in range(rng.randrange(4)):
            sent[rng.randrange(len(sent))] = rng.randrange(256)
        try:
            for _ in range(20):
                peer.feed(bytes(sent))
                sent = bytearray(rng.randbytes(600))
        except NotZmtp:
            continue
        assert len(peer._buffer) < 2 * MAX_BYTES


async def first_message_at(endpoint: str) -> KvMessage:
    with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.bind(endpoint)
        with Subscription(KvEventEndpoints(endpoint)) as subscription:
            await publisher.recv()
            await publisher.send_multipart([b"", bytes(8), b"x"])
            while (message := subscription.take(on_rubbish)) is None:
                assert await subscription.wait(20)
            return message


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("is_abstract", [False, True], ids=["file", "abstract name"])
def test_a_publisher_on_a_local_socket_is_followed(
    new_loop: Callable[[], asyncio.AbstractEventLoop], is_abstract: bool, tmp_path: Path
) -> None:
    place = f"@{tmp_path}" if is_abstract else f"{tmp_path}/events"
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(first_message_at(f"ipc://{place}")) == KvMessage(0, b"x")


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("tcp://no\0name:1", "null"),
        ("tcp://127.0.0.1:1", "127.0.0.1"),
        (f"ipc:///{'long' * 100}", "too long"),
        ("ipc:///no/such/file", "No such file"),
    ],
)
async def test_a_stream_that_cannot_connect_says_why_and_may_still_be_closed(endpoint: str, reason: str) -> None:
    with capture_logs() as logs:
        stream = KvEventStream(ReplicaId("a"), KvEventEndpoints(endpoint), lost_after_s=0.2)
        await stream.follow(lambda changes: stream.close() if isinstance(changes[0], EventsLost) else None)
    [line] = logs
    assert (line["event"], line["endpoint"]) == ("kv_events_not_connected", endpoint)
    assert reason in line["reason"]


async def test_an_address_for_past_events_that_nothing_can_connect_to_has_none() -> None:
    with pytest.raises(ReplayUnavailable, match="cannot connect"):
        await anext(replayed(KvEventEndpoints("tcp://127.0.0.1:1", f"ipc:///{'long' * 100}"), 0, 0.2))


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "greet"),
        (GREETING + READY, "not ROUTER"),
        (GREETING + ROUTER_READY + b"\x02" + (2**30).to_bytes(8, "big"), "bytes"),
        (GREETING + ROUTER_READY, "no answer"),
        (GREETING + ROUTER_READY + b"\x01\x00\x01\x00", "no answer"),
    ],
    ids=["another protocol", "a publisher", "too large", "silent", "half a message"],
)
async def test_a_peer_that_repeats_no_events_is_left_in_time(sent: bytes, reason: str) -> None:
    async with asked_for_past_events() as (router, asked):
        await asyncio.get_running_loop().sock_sendall(router, sent)
        with pytest.raises(ReplayUnavailable, match=reason):
            await asked


@asynccontextmanager
async def asked_for_past_events() -> AsyncIterator[tuple[socket.socket, asyncio.Task[KvMessage]]]:
    """The engine's side of a connection that asks for past events, and what comes of that within half a second."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        endpoint = "tcp://127.0.0.1:{1}".format(*listening.getsockname())
        asked = asyncio.create_task(first_of(replayed(KvEventEndpoints(endpoint, endpoint), 0, 0.5)))
        router, _ = await asyncio.get_running_loop().sock_accept(listening)
        with router:
            yield router, asked


async def first_of(messages: AsyncGenerator[KvMessage, None]) -> KvMessage:
    async with aclosing(messages):
        return await anext(messages)


async def test_a_publisher_that_begins_to_listen_later_is_asked_for_past_events() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    endpoint = f"tcp://127.0.0.1:{port}"
    asked = asyncio.create_task(first_of(replayed(KvEventEndpoints(endpoint, endpoint), 7, PATIENCE_S)))
    await asyncio.sleep(0)
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(endpoint)
        client, *request = await router.recv_multipart()
        assert request == [b"", (7).to_bytes(8, "big")]
        await router.send_multipart([client, b"", b"topic", (7).to_bytes(8, "big"), LONG_BODY])
        assert await asked == KvMessage(7, LONG_BODY)


async def test_a_stream_says_why_it_gives_a_connection_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preble.engines.kv_events.subscription.MAX_MESSAGE_BYTES", 1_000)  # ships 16 MiB
    with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as publisher, capture_logs() as logs:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        stream = KvEventStream(ReplicaId("a"), KvEventEndpoints(f"tcp://127.0.0.1:{port}"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stream.follow(lambda changes: None))
            await publisher.recv()
            await publisher.send_multipart([b"", bytes(8), bytes(1_001)])
            await eventually(lambda: any(line["event"] == "kv_events_given_up" for line in logs), "it says so")
            stream.close()
    assert any("1001 bytes" in line["reason"] for line in logs)


class Peer(asyncio.Protocol):
    """What listens in place of a publisher: it says a piece to each connection, the last to all later ones, and then
    nothing more."""

    def __init__(self, *pieces: bytes) -> None:
        self.heard = b""
        self.left = list(pieces)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.left.pop(0) if len(self.left) > 1 else self.left[0])

    def data_received(self, data: bytes) -> None:
        self.heard += data


@asynccontextmanager
async def subscribed_to(peer: Peer) -> AsyncIterator[Subscription]:
    server = await asyncio.get_running_loop().create_server(lambda: peer, "127.0.0.1", 0)
    async with server:
        with Subscription(KvEventEndpoints("tcp://127.0.0.1:{1}".format(*server.sockets[0].getsockname()))) as made:
            yield made
        await asyncio.sleep(0)


async def test_a_publisher_that_falls_silent_for_good_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preble.engines.kv_events.subscription._BEAT_S", 0.05)  # ships 5 s
    async with subscribed_to(peer := Peer(GREETING + READY)) as subscription:
        while not subscription.is_lost():
            assert await subscription.wait(PATIENCE_S)
        assert subscription.is_connected()
        no_time_to_live = bytes(2)
        await eventually(lambda: b"PING" + no_time_to_live in peer.heard, "it was asked for a sign of life")


async def test_a_publisher_that_asks_on_and_on_and_reads_no_answer_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = "tcp://127.0.0.1:{1}".format(*listening.getsockname())
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with Subscription(KvEventEndpoints(endpoint)) as subscription:
            publisher, _ = await asyncio.get_running_loop().sock_accept(listening)
            with publisher, suppress(ConnectionError):
                await asyncio.get_running_loop().sock_sendall(publisher, GREETING + READY)
                while not subscription.is_lost():
                    await asyncio.get_running_loop().sock_sendall(publisher, PING * 10_000)
            while not subscription.is_lost():
                assert await subscription.wait(20)


async def test_what_answers_otherwise_is_tried_again_until_a_publisher_is_there() -> None:
    no_publisher = b"HTTP/1.1 400 Bad Request"
    async with subscribed_to(peer := Peer(no_publisher, no_publisher, GREETING + READY)) as subscription:
        await eventually(subscription.is_connected, "the third try finds a publisher")
        assert not subscription.is_lost() and peer.left == [GREETING + READY]


async def test_messages_that_nobody_takes_wait_with_the_publisher() -> None:
    num_sent = 20 * QUEUED_MESSAGES
    with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.setsockopt(zmq.SNDHWM, 0)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        with Subscription(KvEventEndpoints(f"tcp://127.0.0.1:{port}")) as subscription:
            await publisher.recv()
            for number in range(num_sent):
                await publisher.send_multipart([b"", number.to_bytes(8, "big"), bytes(1_000)])
            await subscription.wait(PATIENCE_S)
            for number in range(num_sent):
                while (message := subscription.take(on_rubbish)) is None:
                    assert await subscription.wait(PATIENCE_S)
                assert message.seq == number
                assert len(subscription._messages) < 2 * QUEUED_MESSAGES


async def test_many_connections_that_bring_messages_at_once_all_rest_and_are_read_again() -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as publisher, ExitStack() as stack:
        publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        endpoints = KvEventEndpoints(f"tcp://127.0.0.1:{port}")
        subscriptions = [stack.enter_context(Subscription(endpoints)) for _ in range(30)]
        for _ in subscriptions:
            await publisher.recv()
        for number in range(5):
            await publisher.send_multipart([b"", number.to_bytes(8, "big"), b"x"])
            for subscription in subscriptions:
                while (message := subscription.take(on_rubbish)) is None:
                    assert await subscription.wait(PATIENCE_S)
                assert message.seq == number
