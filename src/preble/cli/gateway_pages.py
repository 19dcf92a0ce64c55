"""What a running gateway tells about itself, asked for over HTTP."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from preble.cli.failure import Failure
from preble.errors import ConfigError

GATEWAY = "http://127.0.0.1:8000"
"""Where commands look for one unless told otherwise: where it listens unless told otherwise."""
TIMEOUT_S = 10.0
_DOUBT = "is that a Preble gateway?"

Page = TypeVar("Page")


def gateway_page(
    url: str, page: type[Page], api_key: str | None, *, post: bool = False, timeout_s: float = TIMEOUT_S
) -> Page:
    """The page at `url`; `post`: have the gateway do something for it first.

    Raises: ConfigError: nothing is there, or it wants a key. Failure: the gateway answers with an error, or something
    else does.
    """
    import msgspec

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = Request(url, headers=headers, data=b"" if post else None)
    directly = build_opener(ProxyHandler({}))  # as everything else here; the environment's proxy knows no loopback
    try:
        with directly.open(request, timeout=timeout_s) as answer:
            decoded: Any = msgspec.json.decode(answer.read(), type=page)
    except HTTPError as error:
        with error:
            message = _message(error.read())
        if error.code in (401, 403):
            raise ConfigError(f"{url}: {message or 'a key is needed'}; give --api-key") from error
        raise Failure(message or f"{url} answers with status {error.code}; {_DOUBT}") from error
    except (URLError, TimeoutError, ConnectionError, HTTPException) as error:
        raise ConfigError(f"nothing answers at {url}: {_said(error)}; is a gateway running there (--url)?") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Failure(f"{url} answers with something else than was asked for ({error}); {_DOUBT}") from error
    return decoded  # type: ignore[no-any-return]


def _said(error: BaseException) -> str:
    """What went wrong, without the number that the operating system has for it."""
    reason = getattr(error, "reason", error)
    return getattr(reason, "strerror", None) or str(reason)


def _message(body: bytes) -> str | None:
    """What an error in OpenAI's form says."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None
