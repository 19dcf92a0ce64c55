"""`preble explain`: why a request was sent where it was."""

from __future__ import annotations

from urllib.parse import quote

import click

from preble.cli.gateway_pages import gateway_page
from preble.cli.options import HttpUrl


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
    from preble.gateway.debug import DecisionsPage

    page = gateway_page(f"{url}/debug/decisions/{quote(request_id, safe='')}", DecisionsPage, api_key)
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(page)))
        return
    from preble.decisions.explain import explain

    click.echo("\n\n".join(map(explain, page.decisions)))
