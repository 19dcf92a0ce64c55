"""`preble explain`: why a request went to its replica."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from preble.cli.failure import CommandFailure
from preble.cli.gateway_pages import GATEWAY, gateway_page
from preble.cli.options import HTTP_URL, api_key_option, import_policy_option, option
from preble.cli.output import json_option, write_json
from preble.errors import ConfigError

if TYPE_CHECKING:
    from preble.gateway.pages.debug import DecisionsPage


@click.command("explain")
@click.argument("request_id")
@option("--url", f"The gateway that placed it.  [default: {GATEWAY}]", HTTP_URL)
@api_key_option
@option(
    "--log",
    "Read a decision log (of a gateway or of `preble simulate`) instead of asking a gateway.",
    click.Path(path_type=Path, dir_okay=False),
)
@import_policy_option
@json_option("what is known")
def command(
    request_id: str, url: str | None, api_key: str | None, log: Path | None, import_policy: bool, json_file: Path | None
) -> None:
    """Show what was known when a request was placed, why its replica was chosen, and how it ended.

    REQUEST_ID is the answer's header x-request-id. The gateway remembers only its last decisions
    (decisions.remembered, 10,000 by default); a decision log has all of them.

    \b
    Examples:
      preble explain 5f3a9c01-1a
      preble explain my-own-id --url http://gateway:8000 --json -
      preble explain tool_use-17 --log decisions.jsonl
    """
    if log is not None and url is not None:
        raise ConfigError("give --url or --log, not both")
    page = _asked(request_id, url or GATEWAY, api_key) if log is None else _logged(request_id, log, import_policy)
    if write_json(json_file, page):
        from preble.decisions.explain import explain

        click.echo("\n\n".join(map(explain, page.decisions)))


def _asked(request_id: str, url: str, api_key: str | None) -> DecisionsPage:
    from preble.gateway.pages.debug import DecisionsPage

    return gateway_page(f"{url}/debug/decisions/{quote(request_id, safe='')}", DecisionsPage, api_key)


def _logged(request_id: str, log: Path, import_policy: bool) -> DecisionsPage:
    """Return the same page from a log. Raises: CommandFailure: the request is not in it."""
    from preble.gateway.pages.debug import DecisionsPage
    from preble.lab.replay.log_lookup import decisions_about

    decisions = decisions_about(log, request_id, import_policy=import_policy)
    if not decisions:
        raise CommandFailure(f"no decision about request {request_id!r} in {log}")
    return DecisionsPage(decisions)
