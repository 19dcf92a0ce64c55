"""HTTP/1.1 messages as bytes, without I/O: heads and chunks written, a server's answers parsed."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

import httptools

HeaderList = list[tuple[bytes, bytes]]
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def _status_line(code: int) -> bytes:
    try:
        return f"HTTP/1.1 {code} {HTTPStatus(code).phrase}\r\n".encode()
    except ValueError:
        return b"HTTP/1.1 %d \r\n" % code


_STATUS_LINES = tuple(map(_status_line, range(1000)))
_LINE = b"%b: %b\r\n".__mod__


def answer_head(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    r"""Return the head of an answer. `status`: of three digits, also one that no standard has.

    >>> answer_head(404, [(b"a", b"1")])
    b'HTTP/1.1 404 Not Found\r\na: 1\r\n\r\n'
    >>> answer_head(999, [])
    b'HTTP/1.1 999 \r\n\r\n'
    """
    return b"".join([_STATUS_LINES[status], *map(_LINE, headers), b"\r\n"])


def by_name(headers: HeaderList) -> dict[bytes, bytes]:
    """Return the headers by name: the last of each, but all of `connection`, since each names headers to drop.

    >>> by_name([(b"connection", b"close"), (b"a", b"1"), (b"connection", b"x-hop"), (b"a", b"2")])
    {b'connection': b'close,x-hop', b'a': b'2'}
    """
    found = dict(headers)
    if len(found) < len(headers) and b"connection" in found:
        found[b"connection"] = b",".join(value for name, value in headers if name == b"connection")
    return found


def request_head(start: bytes, headers: Iterable[tuple[str, str]], body_bytes: int | None) -> bytes:
    r"""Return the head of a request. `start`: its first lines. `body_bytes`: None for a request without a body.

    Raises: ValueError: a header has a line break, or a character outside latin-1.

    >>> request_head(b"POST / HTTP/1.1\r\nHost: a\r\n", [("B", "c")], 2)
    b'POST / HTTP/1.1\r\nHost: a\r\nB: c\r\nContent-Length: 2\r\n\r\n'
    >>> request_head(b"GET / HTTP/1.1\r\nHost: a\r\n", [], None)
    b'GET / HTTP/1.1\r\nHost: a\r\n\r\n'
    """
    lines = [*map(": ".join, headers)]
    text = "\r\n".join([*lines, ""])
    if text.count("\n") + text.count("\r") != 2 * len(lines):
        raise ValueError("a header has a line break")
    length = b"" if body_bytes is None else b"Content-Length: %d\r\n" % body_bytes
    return b"%b%b%b\r\n" % (start, text.encode("latin-1"), length)


def chunk(data: bytes) -> bytes:
    r"""Return one chunk of a body whose length is unknown.

    >>> chunk(b"hello")
    b'5\r\nhello\r\n'
    """
    return b"%x\r\n%b\r\n" % (len(data), data)


MAX_HEAD_BYTES = 64 * 1024
"""The longest head of an answer, and the most bytes between two pieces of its body or after the last (extensions of
chunks, trailers). The check comes after each read, so a head may exceed it by one read."""
_EXCERPT_BYTES = 100


class BadAnswer(Exception):
    """The bytes are no HTTP answer."""


class AnswerReader:
    """Parses one answer after the other: `feed` it their bytes. After a complete one the next begins.

    `status`, `headers` (names in lower case): of the answer, once `has_head`. `is_complete`: its body is
    complete. `can_go_on`: whether the connection can then carry another request. Interim answers (1xx) are skipped.
    """

    __slots__ = (
        "_bare_bytes",
        "_is_interim",
        "_keeps_alive",
        "_parser",
        "_pieces",
        "_until_close",
        "can_go_on",
        "has_head",
        "headers",
        "is_complete",
        "status",
    )

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._expect()

    def _expect(self) -> None:
        self.status = 0
        self.headers: HeaderList = []
        self.has_head = self.is_complete = self.can_go_on = False
        self._is_interim = self._until_close = self._keeps_alive = False
        self._bare_bytes = 0
        self._pieces: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        """Return the body's bytes in `data`. Raises: BadAnswer: the connection cannot be used any more."""
        if self.is_complete:
            self._expect()
        self._bare_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.is_complete:
                raise BadAnswer(f"{_why(error)}: {data[:_EXCERPT_BYTES]!r}") from error
            self.can_go_on = False
        if not self.is_complete and self._bare_bytes > MAX_HEAD_BYTES:
            what = "its trailers or a chunk's extension have" if self.has_head else "its head has"
            raise BadAnswer(f"{what} more than {MAX_HEAD_BYTES} bytes")
        pieces = self._pieces
        if not pieces:
            return b""
        self._pieces = []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def eof(self) -> bool:
        """Take the connection's end. Return whether the answer is complete: some answers end with the connection."""
        self.can_go_on = False
        self.is_complete = self.is_complete or (self.has_head and self._until_close)
        return self.is_complete

    def close(self) -> None:
        """Drop the parser: it and this reader refer to each other, which would delay freeing both."""
        del self._parser

    # called by the parser

    def on_message_begin(self) -> None:
        if self.is_complete:  # more than was asked for
            self.can_go_on = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # nobody reads trailers
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.is_complete:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self._is_interim = True
            self.headers = []
            return
        self.status = status
        self.has_head = True
        self._bare_bytes = 0
        self._keeps_alive = self._parser.should_keep_alive()
        self._until_close = b"content-length" not in dict(self.headers) and not any(
            name == b"transfer-encoding" and b"chunked" in value.lower() for name, value in self.headers
        )

    def on_body(self, body: bytes) -> None:
        self._bare_bytes = 0
        if not self.is_complete:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._is_interim:
            self._is_interim = False
        elif not self.is_complete:
            self.is_complete = True
            self.can_go_on = self._keeps_alive


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
