"""Pages of a running gateway, fetched over HTTP."""

from __future__ import annotations

import json
from functools import reduce
from http.client import HTTPException
from operator import getitem
from typing import TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from preble.cli.failure import CommandFailure
from preble.errors import ConfigError

GATEWAY = "http://127.0.0.1:8000"
"""Where commands look for a gateway by default: where a gateway listens by default."""
TIMEOUT_S = 10.0
_DOUBT = "is that a Preble gateway? Give the gateway's address, not a replica's (--url)"

Page = TypeVar("Page")


def gateway_page(
    url: str, page: type[Page], api_key: str | None, *, post: bool = False, timeout_s: float = TIMEOUT_S
) -> Page:
    """Return the page at `url`; `post` uses POST, which makes the gateway act first.

    Raises: ConfigError: no answer, or a key is missing. CommandFailure: an error, or the answer of another server.
    """
    import msgspec

    status, body = ask(url, api_key, post=post, timeout_s=timeout_s)
    if status >= 400:
        message = text_at(body, "error", "message")
        if status in (401, 403):
            raise ConfigError(f"{url}: {message or 'a key is needed'}; give --api-key")
        hint = f"; {_DOUBT}" if status in (404, 405) or not message else ""
        raise CommandFailure((message or f"{url} answers with status {status}") + hint)
    try:
        return msgspec.json.decode(body, type=page)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CommandFailure(f"{url} answers with another page ({error}); {_DOUBT}") from error


def ask(url: str, api_key: str | None = None, *, post: bool = False, timeout_s: float) -> tuple[int, bytes]:
    """Return the status and body of an answer, whatever it is. Raises: ConfigError: there is none."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = Request(url, headers=headers, data=b"" if post else None)
    directly = build_opener(ProxyHandler({}))  # the environment's proxy cannot reach the loopback address
    try:
        with directly.open(request, timeout=timeout_s) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        with error:
            return error.code, error.read()
    except (URLError, TimeoutError, ConnectionError, HTTPException) as error:
        from preble.web.client.failures import why_unreachable

        reason = error.reason if isinstance(error, URLError) and isinstance(error.reason, OSError) else error
        hint = f"{why_unreachable(reason)}; is a gateway running there (--url)?"
        raise ConfigError(f"nothing answers at {url}: {hint}") from error


def text_at(body: bytes, *names: str) -> str | None:
    """Return the text below these names in a page, one in the other; None if it is not there."""
    try:
        return str(reduce(getitem, names, json.loads(body)))
    except (ValueError, KeyError, TypeError):
        return None
