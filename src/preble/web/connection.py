"""One client's connection: uvicorn's, with the bounds that it lacks on the head of a request.

uvicorn bounds how long a connection may be idle between requests, and leaves bodies to the application. Before the
application sees a request, a client could send headers without end, or nothing at all, and keep the connection for
ever. Here a head has to be small and to come in time.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Largest request line and headers together, give or take one read from the socket: four times what nginx takes."""
HEAD_S = 60.0
"""How long a connection may be without a request whose head is complete."""


class BoundedConnection(HttpToolsProtocol):
    """A connection that is closed, with an answer where one helps, when a request's head is too large or too slow."""

    head_s = HEAD_S
    _timer: asyncio.TimerHandle | None = None
    _num_heads = 0
    _in_head = False
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        head = self._num_heads
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head:
            # Bytes that came together with the request before do not count: nobody knows how many they are.
            if self._num_heads in (1, head):
                self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                text = f"the request line and headers have more than {MAX_HEAD_BYTES} bytes; send fewer"
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", text)
                return
        if self._in_head or not self._is_answering():
            self._arm()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_heads += 1
        self._head_bytes = 0
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._disarm()
        super().on_headers_complete()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_s, self._on_late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_late(self) -> None:
        self._timer = None
        if self._is_answering():
            # The head of a request behind one that is being answered is not read on until the answer is complete.
            self._arm()
        elif self._in_head:
            text = f"the request line and headers did not arrive within {self.head_s:g} s"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", text)
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when it cannot parse what comes."""
        self._refuse(HTTPStatus.BAD_REQUEST, "invalid_http", "this is not an HTTP/1.1 request")

    def _refuse(self, status: HTTPStatus, code: str, text: str) -> None:
        """Close the connection, with an answer in OpenAI's form unless another is on its way."""
        if not (self._is_answering() and self.cycle.response_started):
            fields = {"message": text, "type": "invalid_request_error", "param": None, "code": code}
            body = msgspec.json.encode({"error": fields})
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
