"""`preble replay`: play a decision log again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from preble.cli.options import POLICY, import_policy_option, option
from preble.cli.output import json_option, write_json

if TYPE_CHECKING:
    from preble.lab.replay.replay import ReplayResult
    from preble.lab.replay.what_if import PolicyOutcome
    from preble.lab.report import Table

ON_EQUAL_TERMS = """\
What engines cached, evicted and answered in the log belongs to the placements that were made. For every line but the
first, replicas count as reporting nothing: what they cache is a belief, bounded by their KV capacity; times and output
lengths are the log's. Compare such lines with each other, not with the first."""


@click.command("replay")
@click.argument("log", type=click.Path(path_type=Path, dir_okay=False))
@option("--policy policies", "Show what this policy would have done. Repeatable.", POLICY, multiple=True)
@import_policy_option
@json_option("the result")
def command(log: Path, policies: tuple[str, ...], import_policy: bool, json_file: Path | None) -> None:
    """Play a decision log (decisions.log in the configuration) through a fresh scheduler of the same settings.

    Without --policy, each placement is compared with the log; the first difference is shown, with exit status 1. With
    --policy, those policies place the log's requests instead. A log whose policy is module:Class names code to import;
    it is played only with --import-policy, or if --policy names the same class.

    \b
    Examples:
      preble replay decisions.jsonl
      preble replay decisions.jsonl --policy least_load --policy round_robin
    """
    if policies:
        _compare(log, policies, import_policy, json_file)
    else:
        _check(log, import_policy, json_file)


def _check(log: Path, import_policy: bool, json_file: Path | None) -> None:
    from preble.decisions.reader import LogReader
    from preble.lab.replay.replay import Replay

    result = Replay(LogReader(log), import_policy=import_policy).run()
    if write_json(json_file, result):
        click.echo(_verdict(result))
    if result.difference is not None:
        raise click.exceptions.Exit(1)


def _verdict(result: ReplayResult) -> str:
    """Return the result of a replay as text."""
    lines = [f"{result.compared} placements of {result.policy} are made again as {result.written_by} logged them."]
    if result.ended_at is not None:
        lines.append(f"Replayed up to {result.ended_at}.")
    if (difference := result.difference) is not None:
        what = f"request {difference.request_id}" if difference.request_id is not None else "KV events"
        lines += [
            f"Then line {difference.line} differs, {what}:",
            f"  logged:   {difference.logged}",
            f"  replayed: {difference.replayed}",
        ]
    return "\n".join(lines)


def _compare(log: Path, policies: tuple[str, ...], import_policy: bool, json_file: Path | None) -> None:
    from rich.console import Console

    from preble.lab.replay.what_if import outcomes
    from preble.lab.report import print_tables

    found = list(outcomes(log, policies, import_policy=import_policy))
    if write_json(json_file, {"note": ON_EQUAL_TERMS, "outcomes": found}):
        print_tables(Console(), _table(found))
        click.echo(ON_EQUAL_TERMS)


def _table(outcomes: list[PolicyOutcome]) -> Table:
    from preble.lab.report import Table

    rows = [
        (
            f"{outcome.policy}, as logged" if outcome.as_logged else outcome.policy,
            f"{outcome.hit_rate:.1%}",
            f"{outcome.load_imbalance:.2f}",
            f"{sum(share.work_s for share in outcome.replicas.values()):.1f}",
            str(outcome.moved),
            " ".join(str(share.placements) for share in outcome.replicas.values()),
        )
        for outcome in outcomes
    ]
    heads = ("policy", "hit rate", "imbalance", "work, s", "elsewhere", "per replica")
    return Table(heads, rows, f"{outcomes[0].placements} placements, by policy")
