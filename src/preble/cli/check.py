"""`preble check`: whether replicas make the token ids that the gateway makes, and cache what it predicts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from preble.cli.failure import Failure
from preble.cli.gateway_pages import GATEWAY, gateway_page
from preble.cli.options import HttpUrl, api_key_option
from preble.cli.output import STDOUT, json_option, write_json

if TYPE_CHECKING:
    from preble.serving import ParityReport

TIMEOUT_S = 600.0
"""Longer than any check takes: each of its parts has a bound of its own in the gateway (`parity.answer_s`)."""


@click.command("check", short_help="Do the replicas' token ids and caches agree with the gateway's?")
@click.option("--url", type=HttpUrl(), default=GATEWAY, show_default=True, help="The gateway to be asked.")
@api_key_option
@json_option("the reports")
def command(url: str, api_key: str | None, json_file: Path | None) -> None:
    """Have a running gateway check all its replicas now, as it does when each of them joins.

    Compared are the token ids of a text, of special characters, of a chat and of a chat with tools; the tokens that a
    replica reports as cached of a prompt sent twice; and whether its KV events tell of that prompt. It costs each
    replica a prompt of a few blocks, twice.

    Exit status 1 if anything does not agree. What to do then: docs/howto/parity.md

    \b
    Examples:
      preble check
      preble check --url http://gateway:8000 --json -
    """
    from preble.gateway.debug import PARITY, ParityPage
    from preble.serving import Outcome

    page = gateway_page(url + PARITY, ParityPage, api_key, post=True, timeout_s=TIMEOUT_S)
    write_json(json_file, page)
    if json_file != STDOUT:
        click.echo("\n".join(line for report in page.reports for line in _told(report)), nl=bool(page.reports))
    if not page.reports:
        raise Failure("no replica is up, so there is nothing to check")
    if any(report.outcome is Outcome.MISMATCH for report in page.reports):
        raise click.exceptions.Exit(1)


def _told(report: ParityReport) -> Iterator[str]:
    """One replica: a line, and one for each check."""
    count = "" if report.trusted else ", so that its matches count as none"
    yield f"{report.replica} ({report.engine}): {report.outcome}{count}; took {report.took_s:.1f} s"
    for finding in report.findings:
        yield f"    {finding.check:13} {finding.outcome:9} {finding.detail}".rstrip()
