"""Where a replica publishes its KV events: connecting there, and asking the publisher for past ones.

The publisher numbers its messages from 0 with each start, keeps the last ones, and repeats them on request. The live
stream has a connection of its own (`subscription`).
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TypeVar

from preble.background import Backoff
from preble.engines.kv_events.zmtp import GREETING, NotZmtp, ZmtpPeer, dealer
from preble.errors import ConfigError

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of one message, which reports one iteration of the engine: a million tokens take 3 to 5 MB, and reading them holds
up every request. An engine that sends more loses the connection, and is then asked for what it has sent since."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

_ADDRESS = re.compile(r"tcp://[^\s*/]+:(?P<port>\d{1,5})|ipc://\S+", re.ASCII)
_HIGHEST_PORT = 65535
_READ_BYTES = 256 * 1024
_AHEAD_BYTES = 32 * 1024 * 1024
"""Of a replay, twice as much is read before it is wanted: what waits with vLLM beyond 1,000 messages gets lost."""

RECONNECT_S, RECONNECT_MAX_S = 0.1, 2.0

P = TypeVar("P", bound=asyncio.BaseProtocol)


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
        """Return those of a data-parallel rank, where these are rank 0's: its ports are higher by its number.

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
class KvMessage:
    """One numbered message of the publisher; never changed."""

    seq: int
    payload: bytes


class ReplayUnavailable(Exception):
    """Past messages are not available: no endpoint for them, or no answer in time."""


async def replayed(endpoints: KvEventEndpoints, start: int, timeout_s: float) -> AsyncGenerator[KvMessage, None]:
    """Yield past messages from number `start` on, in order, up to the newest.

    Some can be missing in the middle: the publisher's own queue to us may overflow.

    Raises: ReplayUnavailable: none for `timeout_s`, or no endpoint for them; what came until then is good.
    """
    if endpoints.replay is None:
        raise ReplayUnavailable("the engine keeps no past events (no replay endpoint)")
    # A connection for each request: what a request that timed out still brings must not be taken for an answer.
    reader, writer = await _streams(endpoints.replay, timeout_s)
    peer = dealer([b"", start.to_bytes(8, "big")], MAX_MESSAGE_BYTES)
    try:
        writer.write(GREETING)
        while True:
            for frames in await _next_messages(peer, reader, writer, timeout_s):
                if len(frames) == 4 and frames[2] == END_OF_REPLAY:
                    return
                if (message := message_of(frames[1:])) is not None:
                    yield message
    finally:
        writer.transport.abort()


async def _streams(endpoint: str, timeout_s: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect, as often as it takes. Raises: ReplayUnavailable: it takes more than `timeout_s`."""
    reader, backoff, why = asyncio.StreamReader(_AHEAD_BYTES), Backoff(RECONNECT_S, RECONNECT_MAX_S), "no answer"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    transport, protocol = await connected(endpoint, lambda: asyncio.StreamReaderProtocol(reader))
                    return reader, asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())
                except CANNOT_CONNECT as error:
                    why = str(error) or why
                await backoff.pause()
    except TimeoutError:
        raise ReplayUnavailable(f"cannot connect to {endpoint}: {why}") from None


async def _next_messages(
    peer: ZmtpPeer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float
) -> list[list[bytes]]:
    """Return the messages that arrive next, at least one. Raises: ReplayUnavailable: none does within `timeout_s`."""
    messages: list[list[bytes]] = []
    try:
        async with asyncio.timeout(timeout_s):
            while not messages:
                if not (data := await reader.read(_READ_BYTES)):
                    raise ReplayUnavailable("the engine has closed the connection")
                messages, answer = peer.feed(data)
                writer.write(answer)
                await writer.drain()  # it may ask on and on, and not read our answers
    except TimeoutError:
        raise ReplayUnavailable(f"no answer for {timeout_s:g} s") from None
    except (OSError, NotZmtp) as error:
        raise ReplayUnavailable(str(error)) from error
    return messages


CANNOT_CONNECT = (OSError, OverflowError, ValueError)
"""What `connected` raises: a port or host may be none."""


async def connected(endpoint: str, new: Callable[[], P]) -> tuple[asyncio.Transport, P]:
    """Connect to an address of ZMQ's. Raises: one of `CANNOT_CONNECT`."""
    kind, _, address = endpoint.partition("://")
    loop = asyncio.get_running_loop()
    if kind != "ipc":
        host, _, port = address.rpartition(":")
        return await loop.create_connection(new, host.strip("[]"), int(port))
    made = socket.socket(socket.AF_UNIX)
    try:
        made.setblocking(False)
        # at once or not at all; uvloop itself takes no abstract names, which begin with \0
        made.connect("\0" + address[1:] if address[0] == "@" else address)
        return await loop.create_unix_connection(new, sock=made)
    except BaseException:
        made.close()
        raise


def message_of(frames: list[bytes]) -> KvMessage | None:
    """[topic, number, payload] as a message, None if it is none."""
    if len(frames) != 3 or len(frames[1]) != 8:
        return None
    return KvMessage(int.from_bytes(frames[1], "big"), frames[2])
