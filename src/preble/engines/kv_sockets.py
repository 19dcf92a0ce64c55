"""Where a replica publishes its KV events, and asking its publisher for past ones over ZMQ.

The publisher numbers its messages from 0 with each start, keeps the last ones, and repeats them on request. The live
stream has a connection of its own (`kv_subscription`).
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import cache
from typing import Any

import zmq
import zmq.asyncio

from preble.errors import ConfigError

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of one message, which reports one iteration of the engine: a million tokens take 3 to 5 MB, and reading them holds
up every request. An engine that sends more loses the connection, and is then asked for what it has sent since."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

_ADDRESS = re.compile(r"tcp://[^\s*/]+:(?P<port>\d{1,5})|ipc://\S+", re.ASCII)
_HIGHEST_PORT = 65535
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
            if address is not None and not _is_address(address):
                text = f"{address!r} is no address for KV events; give one such as tcp://10.0.0.5:5557"
                raise ConfigError(f"{text}, with a port from 1 to {_HIGHEST_PORT}")

    def of_rank(self, rank: int) -> KvEventEndpoints:
        """Those of a data-parallel rank, where these are rank 0's: its ports are higher by its number.

        Raises: ConfigError: they would be too high.
        """
        replay = None if self.replay is None else _moved(self.replay, rank)
        return KvEventEndpoints(_moved(self.endpoint, rank), replay, self.topic)


def _is_address(text: str) -> bool:
    found = _ADDRESS.fullmatch(text)
    return found is not None and 1 <= int(found["port"] or 1) <= _HIGHEST_PORT


def _moved(address: str, by: int) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + by}" if address.startswith("tcp://") else address


@dataclass(slots=True)
class Message:
    """One numbered message of the publisher; never changed."""

    seq: int
    payload: bytes


class ReplayUnavailable(Exception):
    """Past messages are not available: no endpoint for them, or no answer in time."""


@cache
def _context() -> zmq.asyncio.Context:
    """The context of every replay in this process, so that one thread serves all. By default ZMQ allows 1,023 sockets;
    after a network is back, a large fleet may ask for more replays at once."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


async def replayed(endpoints: KvEventEndpoints, start: int, timeout_s: float) -> AsyncGenerator[Message, None]:
    """Past messages from number `start` on, in order, up to the newest.

    Some can be missing in the middle: the publisher's own queue to us may overflow.

    Raises: ReplayUnavailable: none for `timeout_s`, or no endpoint for them; what came until then is good.
    """
    if endpoints.replay is None:
        raise ReplayUnavailable("the engine keeps no past events (no replay endpoint)")
    # A socket for each request: what a request that timed out still brings must not be taken for an answer.
    dealer = _context().socket(zmq.DEALER)
    try:
        _configure(dealer)
        try:
            dealer.connect(endpoints.replay)
        except zmq.ZMQError as error:
            raise ReplayUnavailable(f"ZMQ cannot connect to {endpoints.replay}: {error}") from error
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
        if (message := message_of(frames[1:])) is not None:
            return message
    raise ReplayUnavailable(f"no answer for {timeout_s:g} s")


def _configure(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RCVHWM, 0)  # what the publisher keeps bounds it
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    # Without these a peer whose machine vanished looks like one with nothing to say.
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)


def message_of(frames: list[bytes]) -> Message | None:
    """[topic, number, payload] as a message, None if it is none."""
    if len(frames) != 3 or len(frames[1]) != 8:
        return None
    return Message(int.from_bytes(frames[1], "big"), frames[2])
