"""The address of a server, as people write it and as we use it."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from preble.errors import ConfigError


def server_url(text: str) -> str:
    """The base URL of a server, without what every request adds; the same server written alike gives the same URL.

    Raises: ConfigError: it is not usable as one; says why, without a password that is in it.

    >>> server_url("http://GPU1:8000/v1/"), server_url("https://host/some/path/")
    ('http://gpu1:8000', 'https://host/some/path')
    """
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a URL: {error}") from error
    if not is_url:
        raise ConfigError(f"{text!r} is not a URL of a server; it looks like http://host:8000")
    if "@" in parts.netloc:
        # URLs name replicas in logs, metrics and headers.
        raise ConfigError(f"the URL of {parts.hostname} has a user name or password; give it as an API key instead")
    if parts.query or parts.fragment:
        raise ConfigError(f"{text!r} has a query or fragment; give the server's address only")
    return _base(parts)


def _base(parts: SplitResult) -> str:
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc.lower()}{path}"
