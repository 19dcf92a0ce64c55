"""The two ZMQ conversations with a KV event publisher: the live stream, and asking for past messages.

The publisher numbers its messages from 0 with each start, keeps the last ones, and repeats them on request.

All streams share one ZMQ context, so one thread of ZMQ's does the input and output of all, and the event loop wakes
only for a stream that has news. Following hundreds of quiet replicas costs next to nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from types import TracebackType
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from preble.errors import ConfigError

RECEIVE_QUEUE_MESSAGES = 4096
"""Live messages that wait for us; what does not fit is dropped, seen as a gap and asked for again."""

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of one message, which reports one iteration of the engine: a million tokens take 3 to 5 MB, and reading them holds
up every request. An engine that sends more loses the connection, and is then asked for what it has sent since."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

_ADDRESS = re.compile(r"tcp://[^\s*/]+:\d{1,5}|ipc://\S+")
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 5_000, 15_000
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 2_000
_MONITOR_NUMBERS = count()
"""For addresses of monitors. ZMQ gives an address free some time after its socket is closed, so none is used twice."""


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

    def of_rank(self, rank: int) -> KvEventEndpoints:
        """Those of a data-parallel rank, where these are rank 0's: its ports are higher by its number."""
        replay = None if self.replay is None else _moved(self.replay, rank)
        return KvEventEndpoints(_moved(self.endpoint, rank), replay, self.topic)


def _moved(address: str, by: int) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + by}" if address.startswith("tcp://") else address


@dataclass(frozen=True, slots=True)
class Message:
    """One numbered message of the publisher."""

    seq: int
    payload: bytes


class ReplayUnavailable(Exception):
    """Past messages are not available: no endpoint for them, or no answer in time."""


@cache
def _context() -> zmq.asyncio.Context:
    """The context of every stream in this process. By default ZMQ allows 1,023 sockets, which 340 streams would use."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


async def replayed(endpoints: KvEventEndpoints, start: int, timeout_s: float) -> AsyncGenerator[Message, None]:
    """Past messages from number `start` on, in order, up to the newest.

    Some can be missing in the middle: the publisher's own queue to us may overflow.

    Raises: ReplayUnavailable: none for `timeout_s`; what came until then is good.
    """
    if endpoints.replay is None:
        raise ReplayUnavailable("the engine keeps no past events (no replay endpoint)")
    # A socket for each request: what a request that timed out still brings must not be taken for an answer.
    dealer = _context().socket(zmq.DEALER)
    try:
        _configure(dealer, receive_queue=0)  # bounded by what the publisher keeps
        dealer.connect(endpoints.replay)
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        while (message := await _next_replayed(dealer, timeout_s)) is not None:
            yield message
    finally:
        dealer.close(linger=0)


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
    counts from 0 again, is then missing. So whoever loses a connection has to make a new one and catch up.
    """

    def __init__(self, endpoints: KvEventEndpoints) -> None:
        """Connects within a running event loop. Raises: zmq.ZMQError: the endpoint is no address."""
        self._topic = endpoints.topic.encode()
        self._connected = False
        self._lost = False
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = zmq.Socket(_context(), zmq.SUB)
        self._monitor: zmq.Socket[bytes] = zmq.Socket(_context(), zmq.PAIR)
        try:
            self._connect(endpoints.endpoint)
        except BaseException:
            self.close()
            raise
        self._watch(self._socket)
        self._watch(self._monitor)

    def _connect(self, endpoint: str) -> None:
        _configure(self._socket, receive_queue=RECEIVE_QUEUE_MESSAGES)
        name = f"inproc://monitor-{next(_MONITOR_NUMBERS)}"
        self._socket.monitor(name, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._monitor.connect(name)
        self._socket.subscribe(self._topic)
        self._socket.connect(endpoint)

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        self._loop.add_reader(socket.FD, self._on_activity, socket)
        self._on_activity(socket)

    def _on_activity(self, socket: zmq.Socket[bytes]) -> None:
        # Asking for the state takes the notice off the descriptor, which would wake the loop again and again.
        if _has_message(socket):
            self._news.set()

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
        while _has_message(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            self._connected |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._lost |= event == zmq.EVENT_DISCONNECTED and self._connected

    def wake(self) -> None:
        """Make `wait` return."""
        self._news.set()

    async def wait(self, timeout_s: float | None) -> bool:
        """Wait for news: a message, a connection made or lost, or `wake`. Returns False if there is none.

        To be called only after `take` and `is_lost` have found nothing more.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        had_news = self._news.is_set()
        self._news.clear()
        return had_news

    async def take(self, on_rubbish: Callable[[], None]) -> Message | None:
        """Return the next message that has arrived, or None. Calls `on_rubbish` for each that cannot be decoded."""
        while _has_message(self._socket):
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            if frames[0] != self._topic:
                continue  # ZMQ filters by prefix: "kv@a" also brings "kv@ab"
            if (message := _message(frames)) is not None:
                return message
            on_rubbish()
            await asyncio.sleep(0)
        return None

    def close(self) -> None:
        for socket in (self._socket, self._monitor):
            if not socket.closed:
                self._loop.remove_reader(socket.FD)
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._socket.close(linger=0)
        self._monitor.close(linger=0)


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def _configure(socket: zmq.Socket[Any], *, receive_queue: int) -> None:
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
