"""Server URLs, as people write them and as Preble uses them."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from preble.errors import ConfigError


def server_url(text: str) -> str:
    """Return a server's base URL, without `/v1` or path: the same server always gives the same URL.

    Raises: ConfigError: it is not usable as one; says why, without any password in it.

    >>> server_url("http://GPU1:8000/v1/"), server_url("https://host/some/path/")
    ('http://gpu1:8000', 'https://host/some/path')
    """
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a URL: {error}") from error
    if not is_url:
        raise ConfigError(f"{text!r} is not a URL of a server; give one like http://host:8000")
    if "@" in parts.netloc:
        # URLs name replicas in logs, metrics and headers.
        raise ConfigError(f"the URL of {parts.hostname} has a user name or password; give it as an API key instead")
    if parts.query or parts.fragment:
        raise ConfigError(f"{text!r} has a query or fragment; give only the server's address")
    return _base(parts)


def _base(parts: SplitResult) -> str:
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc.lower()}{path}"
