"""The load generator of the benchmark of the gateway: ready-made requests, over connections that stay open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools


@dataclass(frozen=True, slots=True)
class Question:
    """A request's path and JSON body. `is_streamed`: whether events are to come."""

    path: str
    body: bytes
    is_streamed: bool

    def as_bytes(self, host: str) -> bytes:
        head = f"POST {self.path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(self.body)}\r\n\r\n".encode() + self.body


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds from sending a request to the first byte of the answer's body, and to its end."""

    first_byte_s: float
    end_s: float


class Connection(asyncio.Protocol):
    """One connection to a server; one question at a time."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[Times] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._host = "{}:{}".format(*transport.get_extra_info("peername"))

    async def ask(self, question: Question) -> Times:
        """Raises: RuntimeError: the answer is not what the upstream gave, or the connection broke."""
        self._parser = httptools.HttpResponseParser(self)
        self._question = question
        self._body = bytearray()
        self._answer = asyncio.get_running_loop().create_future()
        data = question.as_bytes(self._host)
        self._sent_at = time.perf_counter()
        self._transport.write(data)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if not self._body:
            self._first_at = time.perf_counter()
        self._body += body

    def on_message_complete(self) -> None:
        ended_at = time.perf_counter()
        assert self._answer is not None
        status, end = self._parser.get_status_code(), b"data: [DONE]\n\n" if self._question.is_streamed else b"}"
        if status != 200 or not self._body.endswith(end):
            self._answer.set_exception(RuntimeError(f"answered with status {status}: {bytes(self._body[:300])!r}"))
        else:
            self._answer.set_result(Times(self._first_at - self._sent_at, ended_at - self._sent_at))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(RuntimeError(f"the connection broke: {error}"))

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()


async def connected(url: str) -> Connection:
    parts = urlsplit(url)
    _, connection = await asyncio.get_running_loop().create_connection(Connection, parts.hostname, parts.port)
    return connection


async def ask_all(connections: Sequence[Connection], questions: Sequence[Question]) -> None:
    """Each connection asks the next question when it has its answer. Raises: as `Connection.ask`."""

    async def ask_in_turn(connection: Connection, left: Iterator[Question]) -> None:
        for question in left:
            await connection.ask(question)

    left = iter(questions)
    async with asyncio.TaskGroup() as group:
        for connection in connections:
            group.create_task(ask_in_turn(connection, left))
