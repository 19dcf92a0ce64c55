"""`preble ready`: whether a server takes requests, for health checks."""

from __future__ import annotations

import os

import click

from preble.cli.failure import CommandFailure
from preble.cli.gateway_pages import ask, text_at
from preble.cli.options import HTTP_URL, option
from preble.errors import ConfigError

TIMEOUT_S = 5.0


def _own_url() -> str:
    """Return where a command of Preble listens that was started with this environment."""
    return f"http://127.0.0.1:{os.environ.get('PREBLE_PORT') or 8000}"


@click.command("ready")
@option(
    "--url",
    "Whom to ask.  [default: http://127.0.0.1:8000, or PREBLE_PORT]",
    HTTP_URL,
    show_default=False,
    default=_own_url,
)
def command(url: str) -> None:
    """Ask whether a server takes requests, for the health check of a container. Says so in one line.

    It asks /ready, and /health of an engine, which has no such page. A gateway, picker or selection service is ready
    once a replica is up, and not while it drains. Exit status 1 if it is not ready or does not answer.

    \b
    Examples:
      preble ready
      preble ready --url http://gpu1:8000
    """
    try:
        status, body = ask(f"{url}/ready", timeout_s=TIMEOUT_S)
        if status == 404:
            status, body = ask(f"{url}/health", timeout_s=TIMEOUT_S)
    except ConfigError as error:  # status 2 means something else to Docker
        raise CommandFailure(str(error)) from error
    if status != 200:
        raise CommandFailure(f"{url} is not ready: {text_at(body, 'status') or f'status {status}'}")
    click.echo(f"{url} is ready")
