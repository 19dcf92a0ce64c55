"""`preble explain`: why a request was sent where it was."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

import click

from preble.cli.failure import Failure
from preble.cli.options import HttpUrl
from preble.errors import ConfigError

if TYPE_CHECKING:
    from preble.gateway.debug import DecisionsPage

TIMEOUT_S = 10.0
_DOUBT = "is that a Preble gateway?"


@click.command("explain", short_help="Why a request was sent where it was.")
@click.argument("request_id")
@click.option(
    "--url", type=HttpUrl(), default="http://127.0.0.1:8000", show_default=True, help="The gateway that placed it."
)
@click.option("--api-key", envvar="PREBLE_API_KEY", help="A client's key, where the gateway wants one.")
@click.option("--json", "as_json", is_flag=True, help="Print what the gateway knows as JSON.")
def command(request_id: str, url: str, api_key: str | None, as_json: bool) -> None:
    """Show what was known when a request was placed, why its replica was chosen, and what came of it.

    REQUEST_ID is the header x-request-id of the answer. The gateway remembers its last decisions only
    (decisions.remembered, 10,000 unless configured).

    \b
    Examples:
      preble explain 5f3a9c01-1a
      preble explain my-own-id --url http://gateway:8000 --json
    """
    page = _asked(f"{url}/debug/decisions/{quote(request_id, safe='')}", api_key)
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(page)))
        return
    from preble.decisions.explain import explain

    click.echo("\n\n".join(map(explain, page.decisions)))


def _asked(url: str, api_key: str | None) -> DecisionsPage:
    """Raises: ConfigError: nothing there, or it wants a key. Failure: the gateway does not know the request."""
    import msgspec

    from preble.gateway.debug import DecisionsPage

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urlopen(Request(url, headers=headers), timeout=TIMEOUT_S) as answer:
            return msgspec.json.decode(answer.read(), type=DecisionsPage)
    except HTTPError as error:
        with error:
            message = _message(error.read())
        if error.code in (401, 403):
            raise ConfigError(f"{url}: {message or 'a key is needed'}; give --api-key") from error
        raise Failure(message or f"{url} answers with status {error.code}; {_DOUBT}") from error
    except (URLError, TimeoutError, ConnectionError, HTTPException) as error:
        raise ConfigError(f"nothing answers at {url}: {getattr(error, 'reason', error)}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Failure(
            f"{url} answers with something else than decisions ({error}); is that a Preble gateway?"
        ) from error


def _message(body: bytes) -> str | None:
    """What an error in OpenAI's form says."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None
