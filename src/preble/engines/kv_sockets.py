"""The two ZMQ conversations with a KV event publisher: the live stream, and asking for past messages.

The publisher numbers its messages from 0 with each start, keeps the last ones, and repeats them on request.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from types import TracebackType

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from preble.errors import ConfigError

RECEIVE_QUEUE_MESSAGES = 4096
"""Live messages that wait for us; what does not fit is dropped, seen as a gap and asked for again."""

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of one message, which tells of one iteration of the engine: a million tokens take 3 to 5 MB, and reading them holds
up every request. An engine that sends more loses the connection, and is then asked for what it has sent since."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

_ADDRESS = re.compile(r"tcp://[^\s*/]+:\d{1,5}|ipc://\S+")
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 5_000, 15_000
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 2_000


@dataclass(frozen=True, slots=True)
class KvEventEndpoints:
    """Where to connect for a replica's KV events. `replay`: for past messages, None where it keeps none.

    Raises: ConfigError: an address that ZMQ cannot connect to.
    """

    endpoint: str
    replay: str | None = None
    topic: str = ""

    def __post_init__(self) -> None:
        for address in (self.endpoint, self.replay):
            if address is not None and not _ADDRESS.fullmatch(address):
                raise ConfigError(f"{address!r} is no address for KV events; give one such as tcp://10.0.0.5:5557")


@dataclass(frozen=True, slots=True)
class Message:
    """One numbered message of the publisher."""

    seq: int
    payload: bytes


class ReplayUnavailable(Exception):
    """Past messages cannot be had: no endpoint for them, or no answer in time."""


class EventSockets:
    """The ZMQ context of one stream. Close it when the stream ends."""

    def __init__(self, endpoints: KvEventEndpoints) -> None:
        self._endpoints = endpoints
        self._context = zmq.asyncio.Context()

    def subscribe(self) -> Subscription:
        """Connect to the live stream. Raises: zmq.ZMQError: the endpoint is no address."""
        return Subscription(self._context, self._endpoints)

    async def replay(self, start: int, timeout_s: float) -> AsyncGenerator[Message, None]:
        """Past messages from number `start` on, in order, up to the newest.

        Some can be missing in the middle: the publisher's own queue to us may overflow.

        Raises: ReplayUnavailable: none for `timeout_s`; what came until then is good.
        """
        if self._endpoints.replay is None:
            raise ReplayUnavailable("the engine keeps no past events (no replay endpoint)")
        # A socket for each request: what a request that timed out still brings must not be taken for an answer.
        dealer = self._context.socket(zmq.DEALER)
        try:
            _configure(dealer, receive_queue=0)  # bounded by what the publisher keeps
            dealer.connect(self._endpoints.replay)
            await dealer.send_multipart([b"", start.to_bytes(8, "big")])
            while (message := await _next_replayed(dealer, timeout_s)) is not None:
                yield message
        finally:
            dealer.close(linger=0)

    def close(self) -> None:
        self._context.destroy(linger=0)


async def _next_replayed(dealer: zmq.asyncio.Socket, timeout_s: float) -> Message | None:
    """The next message of a replay, None at its end. Raises: ReplayUnavailable."""
    while await dealer.poll(int(timeout_s * 1000)):
        frames = await dealer.recv_multipart()
        if len(frames) == 4 and frames[2] == END_OF_REPLAY:
            return None
        if (message := _message(frames[1:])) is not None:
            return message
    raise ReplayUnavailable(f"no answer for {timeout_s:g} s")


class Subscription:
    """One connection to the live stream. A context manager; ends for good when the connection is lost.

    ZMQ would reconnect by itself and say nothing. But what was published in between, perhaps by a new process that
    counts from 0 again, is then missing; so whoever loses a connection has to make a new one and catch up.
    """

    def __init__(self, context: zmq.asyncio.Context, endpoints: KvEventEndpoints) -> None:
        self._topic = endpoints.topic.encode()
        self._connected = False
        self._lost = False
        self._socket = context.socket(zmq.SUB)
        self._monitor: zmq.Socket[bytes] = zmq.Socket(context, zmq.PAIR)
        try:
            self._connect(endpoints.endpoint)
        except BaseException:
            self.close()
            raise

    def _connect(self, endpoint: str) -> None:
        _configure(self._socket, receive_queue=RECEIVE_QUEUE_MESSAGES)
        name = f"inproc://monitor-{id(self)}"
        self._socket.monitor(name, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._monitor.connect(name)
        self._socket.subscribe(self._topic)
        self._socket.connect(endpoint)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def is_connected(self) -> bool:
        self._read_monitor()
        return self._connected

    def is_lost(self) -> bool:
        """Whether the connection, once made, has broken."""
        self._read_monitor()
        return self._lost

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            self._connected |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._lost |= event == zmq.EVENT_DISCONNECTED and self._connected

    async def wait(self, timeout_s: float) -> None:
        """Return when a message is there, or after `timeout_s`."""
        await self._socket.poll(int(timeout_s * 1000))

    async def take(self, on_rubbish: Callable[[], None]) -> Message | None:
        """The next message that has arrived, None for no more. Calls `on_rubbish` for each that is no message."""
        while True:
            try:
                frames = await self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if frames[0] != self._topic:
                continue  # ZMQ filters by prefix: "kv@a" also brings "kv@ab"
            if (message := _message(frames)) is not None:
                return message
            on_rubbish()
            await asyncio.sleep(0)

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._socket.close(linger=0)
        self._monitor.close(linger=0)


def _configure(socket: zmq.asyncio.Socket, *, receive_queue: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RCVHWM, receive_queue)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    # Without these a peer whose machine vanished looks like one with nothing to say.
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)


def _message(frames: list[bytes]) -> Message | None:
    """[topic, number, payload] as a message, None if it is none."""
    if len(frames) != 3 or len(frames[1]) != 8:
        return None
    return Message(int.from_bytes(frames[1], "big"), frames[2])
