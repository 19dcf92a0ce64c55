"""The headers with which browsers let a page of another origin send requests and read answers (CORS)."""

from __future__ import annotations

from collections.abc import Mapping

from preble.serving import HeaderList

_ORIGIN, _METHOD, _HEADERS = b"origin", b"access-control-request-method", b"access-control-request-headers"
_VARY = (b"vary", b"Origin")


class Browsers:
    """Answers browsers about pages of the given origins; `*` stands for every page.

    A key comes in a header that the page sets, so browsers need to send no credentials of their own.
    """

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._every = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, request: Mapping[bytes, bytes]) -> HeaderList:
        """Return the headers of an answer that let the page which sent the request read it, if it may.

        >>> Browsers(("https://a.example",)).headers({b"origin": b"https://b.example"})
        [(b'vary', b'Origin')]
        """
        if self._every:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", b"*")]
        origin = request.get(_ORIGIN, b"")
        if origin not in self._origins:
            return [_VARY]
        return [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", b"*"), _VARY]

    def preflight(self, method: str, request: Mapping[bytes, bytes]) -> HeaderList:
        """Return the headers that tell a browser whether a page may send a request; none if it did not ask."""
        if method != "OPTIONS" or _ORIGIN not in request or _METHOD not in request:
            return []
        return [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", request.get(_HEADERS, b"*")),
            (b"access-control-max-age", b"600"),
        ]
