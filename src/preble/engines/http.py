"""HTTP to one replica: pooled connections, bounded waits, and our own errors in place of the client library's.

What a broken connection means depends on when it breaks. Not connected: the replica has done nothing (`EngineRefused`).
Broken after the request went out: it may have worked (`EngineGone`). One case looks like the second and is neither:
a pooled connection that the server had closed for idleness just as it was used again. It breaks at once and before any
byte of an answer, so a request that fails that way is sent a second time, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from preble.core.types import ReplicaId
from preble.errors import (
    EngineError,
    EngineGone,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
)
from preble.web.failures import why_unreachable
from preble.web.urls import server_url

STALE_WINDOW_S = 1.0
"""A pooled connection that was closed for idleness fails within a round trip; later failures are the replica's."""

MAX_CONTROL_BODY_BYTES = 16 * 1024 * 1024
"""Largest answer to a question of our own (models, metrics, token ids)."""

MAX_ERROR_LETTERS = 200
"""What an error repeats of a replica's words."""

LARGE_BODY_BYTES = 512 * 1024
"""Bodies above this are written in pieces."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HttpTimeouts:
    """Upper bounds on every wait, in seconds.

    `connect_s`: until a connection is made. `first_byte_s`: from the request to the first byte of the answer's body,
    queueing in the engine included. `idle_s`: between two pieces of a body. `control_s`: for a whole question of our
    own. `keep_alive_s`: how long an unused connection is kept; below the 5 s after which uvicorn, and so vLLM, closes
    it, because a request sent in that moment is lost.
    """

    connect_s: float = 5.0
    first_byte_s: float = 600.0
    idle_s: float = 300.0
    control_s: float = 10.0
    keep_alive_s: float = 4.0


class HttpResponse:
    """An answer that is being received: the `EngineResponse` of every engine that speaks HTTP."""

    __slots__ = ("_client", "_first_byte_by", "_response", "_taken", "heard_at")

    def __init__(self, client: HttpClient, response: aiohttp.ClientResponse, first_byte_by: float) -> None:
        self._client = client
        self._response = response
        self._first_byte_by = first_byte_by
        self._taken = False
        self.heard_at: float | None = None

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Can be read once.

        Raises: EngineGone: the connection broke before the end. EngineTimeout: nothing came for too long.
        """
        if self._taken:
            raise RuntimeError("the body of an engine's answer can be read once")
        self._taken = True
        content = self._response.content
        deadline = self._first_byte_by
        idle_s = self._client.timeouts.idle_s
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    chunk = await content.readany()
            except TimeoutError as error:
                raise self._client.error(EngineTimeout, "sent nothing for too long") from error
            except (aiohttp.ClientError, OSError) as error:
                raise self._client.error(EngineGone, f"broke off in the middle of its answer ({error})") from error
            if not chunk:
                return
            self.heard_at = loop.time()
            yield chunk
            deadline = loop.time() + idle_s

    @property
    def is_complete(self) -> bool:
        """Whether the body has been received and read to its end."""
        return self._response.content.at_eof()

    def end(self) -> None:
        """Give the connection back to the pool, or close it if the answer is not read to its end."""
        if self.is_complete:
            self._response.release()
        else:
            self._response.close()


class Exchange:
    """One POST, from entering to leaving; see `Engine.send`."""

    __slots__ = ("_body", "_client", "_headers", "_path", "_response")

    def __init__(self, client: HttpClient, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        self._client = client
        self._path = path
        self._body = body
        self._headers = headers
        self._response: HttpResponse | None = None

    async def __aenter__(self) -> HttpResponse:
        started = asyncio.get_running_loop().time()
        try:
            self._response = await self._client.post(self._path, self._body, self._headers)
        except EngineGone:
            if asyncio.get_running_loop().time() - started > STALE_WINDOW_S:
                raise
            self._response = await self._post_again()
        return self._response

    async def _post_again(self) -> HttpResponse:
        """Once more, the first connection having broken at once."""
        try:
            return await self._client.post(self._path, self._body, self._headers)
        except EngineRefused as error:
            # It accepted the request and is gone now: that is not "has done nothing", perhaps it died of it.
            raise self._client.error(EngineGone, "broke the connection and accepts no new one") from error

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._response is not None:
            self._response.end()


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
        self._authorization = f"Bearer {api_key}" if api_key else None
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    def error(self, kind: type[EngineError], what: str, *, is_silent: bool = False) -> EngineError:
        """An error of this replica that names it. `what`: cut, since a replica's garbage may be part of it."""
        if len(what) > MAX_ERROR_LETTERS:
            what = f"{what[:MAX_ERROR_LETTERS]}…"
        name = self.replica_id if self.replica_id == self.url else f"{self.replica_id} at {self.url}"
        return kind(f"replica {name} {what}", replica_id=self.replica_id, is_silent=is_silent)

    def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> Exchange:
        return Exchange(self, path, body, headers)

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> HttpResponse:
        """Send a JSON body and wait for the head of the answer. The caller must `end()` what it gets.

        Raises: EngineRefused, EngineGone, EngineTimeout, EngineProtocolError.
        """
        first_byte_by = asyncio.get_running_loop().time() + self.timeouts.first_byte_s
        with self._own_errors():
            async with asyncio.timeout_at(first_byte_by):
                response = await self._session_now().post(
                    self.url + path, data=_payload(body), headers=self._headers_of(headers), allow_redirects=False
                )
        return HttpResponse(self, response, first_byte_by)

    async def ask(self, path: str, body: bytes | None = None) -> HttpAnswer:
        """A question of our own: GET, or POST where there is a body. The whole answer, of whatever status.

        Raises: EngineRefused, EngineGone, EngineTimeout, EngineProtocolError.
        """
        method = "GET" if body is None else "POST"
        with self._own_errors():
            async with (
                asyncio.timeout(self.timeouts.control_s),
                self._session_now().request(
                    method,
                    self.url + path,
                    data=body and _payload(body),
                    headers=self._headers_of({}),
                    allow_redirects=False,
                ) as response,
            ):
                content = await self._bounded(response)
        return HttpAnswer(self, path, response.status, response.headers, content)

    async def _bounded(self, response: aiohttp.ClientResponse) -> bytes:
        content = bytearray()
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) > MAX_CONTROL_BODY_BYTES:
                raise self.error(EngineProtocolError, f"answered {response.url.path} with more than 16 MiB")
        return bytes(content)

    @contextmanager
    def _own_errors(self) -> Iterator[None]:
        """Turn what the library raises before a body is being read into our errors."""
        try:
            yield
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            why = why_unreachable(error)
            raise self.error(EngineRefused, f"cannot be reached: {why}", is_silent=_is_silent(error)) from error
        except TimeoutError as error:
            raise self.error(EngineTimeout, "did not answer in time", is_silent=True) from error
        except (aiohttp.ClientResponseError, aiohttp.InvalidURL) as error:
            raise self.error(EngineProtocolError, f"does not answer in HTTP ({error})") from error
        except (aiohttp.ClientError, OSError) as error:
            why = why_unreachable(error)
            raise self.error(EngineGone, f"broke the connection before it answered: {why}") from error

    def _session_now(self) -> aiohttp.ClientSession:
        if self._closed:
            # Whoever still holds this client goes to another replica.
            raise self.error(EngineRefused, "is watched no more")
        if self._session is None:
            # TCP_NODELAY is on for every TCP transport of asyncio and uvloop; no limit: the gateway has its own.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=self.timeouts.keep_alive_s)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.timeouts.connect_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept-Encoding"),
                auto_decompress=False,
            )
        return self._session

    def _headers_of(self, headers: Mapping[str, str]) -> dict[str, str]:
        sent = dict(headers)
        names = {name.lower() for name in sent}
        if "content-type" not in names:
            sent["Content-Type"] = "application/json"
        if self._authorization and "authorization" not in names:
            sent["Authorization"] = self._authorization
        return sent

    async def close(self) -> None:
        """Close every connection. May be called twice."""
        self._closed = True
        if self._session is not None:
            await self._session.close()


def _is_silent(error: aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError) -> bool:
    """Whether no machine answered: none that refuses the connection, and no name server that knows none."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return False
    return not (isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError))


def _payload(body: bytes) -> bytes | BytesIO:
    """The library writes a large body piece by piece, letting others have their turn, only if it comes as a file."""
    return body if len(body) <= LARGE_BODY_BYTES else BytesIO(body)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The whole answer to a question of our own."""

    client: HttpClient
    path: str
    status: int
    headers: Mapping[str, str]
    content: bytes

    def require_ok(self) -> None:
        """Raises: EngineRefused: the status is not 200."""
        if self.status == 200:
            return
        hint = "; give its API key" if self.status in (401, 403) else ""
        raise self.client.error(EngineRefused, f"answers {self.path} with status {self.status}{hint}")

    def decode(self, kind: type[T] | Any) -> T:
        """The body as a value of this type; the status must be 200. Raises: EngineRefused, EngineProtocolError."""
        self.require_ok()
        try:
            decoded: T = msgspec.json.decode(self.content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self.client.error(
                EngineProtocolError, f"answers {self.path} with something else ({error})"
            ) from error
        return decoded
