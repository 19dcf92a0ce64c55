"""HTTP to one replica: pooled connections, bounded waits, and errors that name it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterable, Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from preble.core.types import ReplicaId
from preble.engines.awaited import AwaitedAnswer, Forwarded
from preble.errors import EngineError, EngineProtocolError, EngineRefused, EngineTimeout
from preble.web.client.failures import why_unreachable
from preble.web.client.pool import ConnectionPool, MakeError, Ongoing, Receiver
from preble.web.messages import HeaderList, request_head
from preble.web.urls import server_url

MAX_CONTROL_BODY_BYTES = 16 * 1024 * 1024
"""Largest answer to a question of our own (models, metrics, token ids)."""

MAX_ERROR_LETTERS = 200
"""What an error repeats of a replica's words."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HttpTimeouts:
    """Upper bounds on every wait, in seconds.

    `connect_s`: until a connection is made. `first_byte_s`: from the request's end to the first byte of the answer's
    body, queueing in the engine included. `idle_s`: between two pieces of a body. `control_s`: for a whole question of
    our own. `keep_alive_s`: how long an unused connection is kept; below the 5 s after which uvicorn, and so vLLM,
    closes it, because a request sent in that moment is lost.
    """

    connect_s: float = 5.0
    first_byte_s: float = 600.0
    idle_s: float = 300.0
    control_s: float = 10.0
    keep_alive_s: float = 4.0


class HttpClient:
    """Every connection to one replica. Not bound to an event loop until first used; then to that one."""

    def __init__(
        self, url: str, replica_id: ReplicaId, *, api_key: str | None = None, timeouts: HttpTimeouts | None = None
    ) -> None:
        """`url`: base URL, without `/v1`. `api_key`: sent with each request that brings no `Authorization` of its own.

        Raises: ConfigError: not the URL of a server.
        """
        self.url = server_url(url)
        self.host = urlsplit(self.url).hostname or ""
        self.replica_id = replica_id
        self.timeouts = timeouts or HttpTimeouts()
        parts = urlsplit(self.url)
        self._base_path = parts.path.encode()
        self._host_line = b"Host: %b\r\n" % parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii")
        new_pool = partial(
            ConnectionPool,
            self.host,
            parts.port or (443 if parts.scheme == "https" else 80),
            tls=_tls() if parts.scheme == "https" else None,
            connect_s=self.timeouts.connect_s,
            keep_s=self.timeouts.keep_alive_s,
            error=self.error,
            why=lambda error: (why_unreachable(error), _is_silent(error)),
        )
        self._pool = new_pool()
        # Of their own: a check must find out whether the server accepts connections, however many requests keep some.
        self._questions = new_pool()
        self._authorization = f"Bearer {api_key}" if api_key else None

    def error(self, kind: type[EngineError], what: str, *, is_silent: bool = False) -> EngineError:
        """Return an error of this replica that names it. `what`: cut, since a replica's garbage may be part of it."""
        if len(what) > MAX_ERROR_LETTERS:
            what = f"{what[:MAX_ERROR_LETTERS]}…"
        name = self.replica_id if self.replica_id == self.url else f"{self.replica_id} at {self.url}"
        return kind(f"replica {name} {what}", replica_id=self.replica_id, is_silent=is_silent)

    def begin(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        receiver: Receiver,
        on_unfinished: Callable[[], None] | None = None,
    ) -> Ongoing:
        """POST a JSON body; `receiver` hears of the answer, not before this returns. No time limit but `connect_s`.

        `on_unfinished`: called once if the exchange ends in another way than with the answer's end.
        Raises: EngineRefused: the client is closed.
        """
        return self._pool.begin((self._head(b"POST", _quoted(path), headers, len(body)), body), receiver, on_unfinished)

    def _head(self, method: bytes, target: bytes, headers: Mapping[str, str], body_bytes: int | None) -> bytes:
        start = b"%b %b%b HTTP/1.1\r\n%b" % (method, self._base_path, target, self._host_line)
        return request_head(start, self._headers_of(headers).items(), body_bytes)

    def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> AwaitedAnswer:
        """Do as `begin`, for coroutines."""
        return AwaitedAnswer(self, partial(self.begin, path, body, headers))

    def forward(
        self, method: str, path: str, headers: Mapping[str, str], body: AsyncIterable[bytes] | None = None
    ) -> AwaitedAnswer:
        """Pass on a request as its body comes: a context that waits for the head of the answer, as that of `send` does.

        `path`: as for `ask`. `body`: taken once there is a connection. The time in which it gives no piece does not
        count for `first_byte_s`.
        """
        target, verb = _quoted_query(path), method.encode()
        if body is None:
            head = self._head(verb, target, headers, None if method == "GET" else 0)
            return AwaitedAnswer(self, partial(self._pool.begin, (head, b"")))
        is_chunked = "content-length" not in headers
        sent = {**headers, "Transfer-Encoding": "chunked"} if is_chunked else headers
        begin = partial(self._pool.begin_streamed, self._head(verb, target, sent, None))
        return Forwarded(self, begin, body, is_chunked=is_chunked)

    async def ask(self, path: str, body: bytes | None = None) -> HttpAnswer:
        """Return a question of our own: GET, or POST where there is a body. The whole answer, of whatever status.

        `path`: perhaps with a query, quoted as in a URL.
        Raises: EngineRefused, EngineGone, EngineTimeout, EngineProtocolError.
        """
        target, answer = _quoted_query(path), _WholeAnswer(path, MAX_CONTROL_BODY_BYTES, self.error)
        head = self._head(b"GET", target, {}, None) if body is None else self._head(b"POST", target, {}, len(body))
        ongoing = self._questions.begin((head, body or b""), answer)
        try:
            content = await answer.content(self.timeouts.control_s)
        except BaseException:
            ongoing.abort()
            raise
        return HttpAnswer(self, path, answer.status, answer.headers, content)

    def _headers_of(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        if "content-type" in headers and (self._authorization is None or "authorization" in headers):
            return headers
        sent = dict(headers)
        names = {name.lower() for name in sent}
        if "content-type" not in names:
            sent["Content-Type"] = "application/json"
        if self._authorization and "authorization" not in names:
            sent["Authorization"] = self._authorization
        return sent

    async def close(self) -> None:
        """Close every connection. May be called twice."""
        self._pool.close()
        self._questions.close()


def _is_silent(error: BaseException) -> bool:
    """Return whether no machine answered: none that refuses the connection, and no name server that knows none."""
    return not isinstance(error, (ConnectionRefusedError, socket.gaierror))


_PATH_LETTERS = "/:@!$&'()*+,;=~-._"


@lru_cache(256)
def _quoted(path: str) -> bytes:
    """Return a path as a request's first line can have it; clients choose some."""
    return quote(path, safe=_PATH_LETTERS).encode()


def _quoted_query(path: str) -> bytes:
    return quote(path, safe=f"{_PATH_LETTERS}?%").encode()


@cache
def _tls() -> ssl.SSLContext:
    """Make the context once: it reads the certificates of all authorities."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class _WholeAnswer:
    """A whole answer while it comes, a `Receiver`. `status`, `headers`: known when `content` returns."""

    def __init__(self, path: str, most_bytes: int, error: MakeError) -> None:
        """`path`: what was asked. `most_bytes`: of the body. `error`: makes the errors that `content` raises."""
        self._path = path
        self._most_bytes = most_bytes
        self._error = error
        self.status = 0
        self.headers: HeaderList = []
        self._pieces = bytearray()
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()

    async def content(self, most_s: float) -> bytes:
        """Return the body when the answer is complete. Raises: EngineError: it is not within `most_s`, or too large."""
        timer = self._loop.call_later(most_s, self._late)
        try:
            await self._end
        finally:
            timer.cancel()
        return bytes(self._pieces)

    def _late(self) -> None:
        self.failed(self._error(EngineTimeout, "did not answer in time", is_silent=True))

    def answered(self, status: int, headers: HeaderList) -> None:
        self.status, self.headers = status, headers

    def received(self, data: bytes) -> None:
        self._pieces += data
        if len(self._pieces) > self._most_bytes:
            text = f"answered {self._path} with more than {self._most_bytes // 2**20} MiB"
            self.failed(self._error(EngineProtocolError, text))

    def ended(self) -> None:
        if not self._end.done():
            self._end.set_result(None)

    def failed(self, error: EngineError) -> None:
        if not self._end.done():
            self._end.set_exception(error)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The whole answer to a question of our own. `headers`: names in lower case."""

    client: HttpClient
    path: str
    status: int
    headers: HeaderList
    content: bytes

    def require_ok(self) -> None:
        """Raises: EngineRefused: the status is not 200."""
        if self.status == 200:
            return
        hint = "; give its API key" if self.status in (401, 403) else ""
        raise self.client.error(EngineRefused, f"answers {self.path} with status {self.status}{hint}")

    def decode(self, kind: type[T] | Any) -> T:
        """Return the body as this type; the status must be 200. Raises: EngineRefused, EngineProtocolError."""
        self.require_ok()
        try:
            decoded: T = msgspec.json.decode(self.content, type=kind)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise self.client.error(
                EngineProtocolError, f"answers {self.path} with something else ({error})"
            ) from error
        return decoded
