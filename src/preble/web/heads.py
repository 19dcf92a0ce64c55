"""Heads of HTTP messages, and chunks, as bytes. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

HeaderList = list[tuple[bytes, bytes]]
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def _status_line(code: int) -> bytes:
    try:
        return f"HTTP/1.1 {code} {HTTPStatus(code).phrase}\r\n".encode()
    except ValueError:
        return b"HTTP/1.1 %d \r\n" % code


_STATUS_LINES = tuple(map(_status_line, range(1000)))


def answer_head(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    r"""Return the head of an answer. `status`: of three digits, also one that no standard has.

    >>> answer_head(404, [(b"a", b"1")])
    b'HTTP/1.1 404 Not Found\r\na: 1\r\n\r\n'
    >>> answer_head(999, [])
    b'HTTP/1.1 999 \r\n\r\n'
    """
    return b"".join([_STATUS_LINES[status], *[b"%b: %b\r\n" % header for header in headers], b"\r\n"])


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
    lines = [f"{name}: {value}" for name, value in headers]
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
