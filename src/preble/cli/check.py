"""`preble check`: whether replicas compute the gateway's token ids, and cache what it predicts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from preble.cli.failure import CommandFailure
from preble.cli.gateway_pages import GATEWAY, gateway_page
from preble.cli.options import HTTP_URL, api_key_option, option
from preble.cli.output import json_option, write_json

if TYPE_CHECKING:
    from preble.serving import ParityReport

TIMEOUT_S = 600.0
"""Longer than any check: the gateway limits each of its parts (`parity.answer_s`)."""


@click.command("check")
@option("--url", "The gateway to ask.", HTTP_URL, default=GATEWAY)
@api_key_option
@json_option("the reports")
def command(url: str, api_key: str | None, json_file: Path | None) -> None:
    """Make a running gateway check all its replicas now, as it does when a replica joins.

    It compares the token ids of a text, of special characters, of a chat and of a chat with tools, and the answers to
    texts with those to their token ids. It sends a prompt of a few blocks twice, and compares the tokens that the
    replica reports as cached, and its KV events, with the prediction. Where
    replicas copy KV from each other, it compares the answers after a copy.

    Exit status 1 if anything differs; docs/howto/parity.md says what to do then.

    \b
    Examples:
      preble check
      preble check --url http://gateway:8000 --json -
    """
    from preble.gateway.pages.debug import PARITY, ParityPage
    from preble.serving import ParityOutcome

    page = gateway_page(url + PARITY, ParityPage, api_key, post=True, timeout_s=TIMEOUT_S)
    if write_json(json_file, page):
        click.echo("\n".join(line for report in page.reports for line in _told(report)), nl=bool(page.reports))
    if not page.reports:
        raise CommandFailure("no replica is up; start one, then check again")
    if any(report.outcome is ParityOutcome.MISMATCH for report in page.reports):
        raise click.exceptions.Exit(1)


def _told(report: ParityReport) -> Iterator[str]:
    """Return the lines of one replica: one for it, and one for each check."""
    count = "" if report.trusted else ", so that its matches count as none"
    yield f"{report.replica} ({report.engine}): {report.outcome}{count}; took {report.took_s:.1f} s"
    for finding in report.findings:
        yield f"    {finding.check:13} {finding.outcome:9} {finding.detail}".rstrip()
