"""Who may ask: the holders of API keys, and pages in browsers (CORS).

A browser lets any page send some requests without asking first (a form's), and lets a page ask its own site, which may
have a name that leads to this machine (DNS rebinding). A gateway without keys would answer both, so it looks at what
the browser says of the page, and at the name by which it is asked.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256

from preble.config import AuthConfig, GatewayConfig
from preble.config.keys import KeyConfig, load_keys, named_key
from preble.prompts.endpoints import ErrorForm, HeaderList
from preble.rules.callers import ANYBODY, Caller

UNAUTHORIZED = ErrorForm(
    401,
    "authentication_error",
    "invalid_api_key",
    "give a valid API key, as `Authorization: Bearer KEY` or `x-api-key: KEY`",
)

NOBODY = Caller(is_admin=False)
"""The caller whose key is missing or wrong."""


class KeyRing:
    """The keys that are accepted. Without any, everybody is let in and may do everything.

    `has_keys`: whether anybody is asked for a key.

    Keys are compared by their hashes, so the time of a check reveals nothing about a key.
    """

    def __init__(self, config: AuthConfig, classes: tuple[str, ...] = ()) -> None:
        """`classes`: of priority, which keys may name. Raises: ConfigError: the file of keys is unusable."""
        self._config = config
        self._classes = classes
        callers: dict[str, Caller] = {}
        for is_admin, given in ((False, self._config.api_keys), (True, self._config.admin_keys)):
            for name, digest in map(named_key, given):
                callers[digest] = _caller(name, KeyConfig(digest, admin=is_admin))
        if self._config.keys_file is not None:
            named = load_keys(self._config.keys_file, self._classes)
            callers |= {key.sha256: _caller(name, key) for name, key in named.items()}
        # The same in every gateway that has these keys, also after a restart: what is cached stays usable.
        secrets = {callers[digest].tenant: digest for digest in sorted(callers, reverse=True)}
        self._callers: Mapping[str, Caller] = {
            digest: replace(caller, secret=secrets[caller.tenant]) for digest, caller in callers.items()
        }
        self.has_keys = bool(callers) or config.keys_file is not None

    @property
    def num_keys(self) -> int:
        """How many keys are accepted."""
        return len(self._callers)

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller | None:
        """Return who sends a request with these headers; None if the key is missing or wrong."""
        if not self.has_keys:
            return ANYBODY
        return self._callers.get(sha256(_given(headers)).hexdigest())


def _given(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    return bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()


def _caller(name: str, key: KeyConfig) -> Caller:
    return Caller(
        name=name,
        tenant=key.tenant or name,
        is_admin=key.admin,
        shares_cache=key.share_cache,
        weight=key.weight,
        limits=key,
    )


_ORIGIN, _METHOD, _HEADERS = b"origin", b"access-control-request-method", b"access-control-request-headers"
_VARY = (b"vary", b"Origin")
_SIMPLE = frozenset(
    {b"", b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data"},
)
"""Types of bodies that a browser sends for any page, without asking."""
_ADDRESS = re.compile(r"\[[0-9a-f:.%]+\]|\d{1,3}(?:\.\d{1,3}){3}", re.ASCII)
_NOBODYS = re.compile(r"[^.]+|.+\.(?:localhost|local|internal|svc|lan|home\.arpa)")
"""Names that nobody can register: without a dot, or with an ending that only a network's own DNS knows. A cluster's
long names end in `.svc.cluster.local`."""


class Browsers:
    """Answers browsers about pages of the given origins, and refuses what a page may not.

    `origins`: whose pages may ask and read the answers; `*` stands for every page. A key comes in a header that the
    page sets, so browsers need to send no credentials of their own.
    """

    def __init__(self, config: GatewayConfig, *, has_keys: bool) -> None:
        self.origins = frozenset(origin.encode() for origin in config.browsers.origins)
        self._every = "*" in config.browsers.origins
        self._has_keys = has_keys
        self._hosts = frozenset({config.host, socket.gethostname(), *config.browsers.hosts})

    def headers(self, request: Mapping[bytes, bytes]) -> HeaderList:
        """Return the headers of an answer that let the page which sent the request read it, if it may.

        >>> from preble.config import BrowsersConfig
        >>> named = GatewayConfig(browsers=BrowsersConfig(("https://a.example",)))
        >>> Browsers(named, has_keys=False).headers({b"origin": b"https://b.example"})
        [(b'vary', b'Origin')]
        """
        if not self.origins:
            return []
        if self._every:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", b"*")]
        origin = request.get(_ORIGIN, b"")
        if origin not in self.origins:
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

    def refusal(self, request: Mapping[bytes, bytes]) -> ErrorForm | None:
        """Return why a POST is refused, None if it is not. Only a page's is: other programs send no `Origin`."""
        origin = request.get(_ORIGIN)
        if origin is None or self._every or origin in self.origins:
            return None
        given = request.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if given in _SIMPLE:
            text = (
                f"the body's type is {given.decode('latin-1') or 'missing'!r}, which a browser sends for any page; "
                "send `Content-Type: application/json`, or name the page's origin in `browsers.origins`"
            )
            return ErrorForm(415, "invalid_request_error", "unsupported_media_type", text)
        return self.unknown_host(request)

    def unknown_host(self, request: Mapping[bytes, bytes]) -> ErrorForm | None:
        """Return the refusal of a request that asks for a name which may be a page's own, None if it does not.

        With keys there is none: no page has one.
        """
        if self._has_keys:
            return None
        host = _name(request.get(b"host", b"").decode("latin-1"))
        if not host or host in self._hosts or _ADDRESS.fullmatch(host) or _NOBODYS.fullmatch(host):
            return None
        text = (
            f"this gateway has no keys, so it answers this under addresses and names of its own network only, and not "
            f"under {host[:200]!r}; name that in `browsers.hosts`, or set `auth.admin_keys`"
        )
        return ErrorForm(403, "permission_error", "unknown_host", text)


def _name(host: str) -> str:
    """Return a `Host` header's name or address, without its port.

    >>> _name("[::1]:8000"), _name("Preble.NS.svc.:8000"), _name("10.0.0.5")
    ('[::1]', 'preble.ns.svc', '10.0.0.5')
    """
    return re.sub(r":\d*\Z", "", host.strip().lower()).rstrip(".")
