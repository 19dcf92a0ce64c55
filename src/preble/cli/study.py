"""`preble workload study`: lengths of prompts, what they share, and how requests arrive."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import click

from preble.cli.options import POSITIVE, option
from preble.cli.output import DRAWN_FILE, STDOUT, json_option, made_by, write_json, write_result
from preble.errors import ConfigError

if TYPE_CHECKING:
    from preble.core.types import PackedTokens
    from preble.lab.workloads import WorkloadRequest
    from preble.lab.workloads.study import Study, Tokenize

DEFAULT_REQUESTS = 5000
"""Requests of a named workload, which has no end."""


@click.command("study")
@click.argument("sources", nargs=-1, required=True, metavar="NAME|FILE...")
@option("--requests", f"Requests of each.  [default: all of a trace, otherwise {DEFAULT_REQUESTS}]", POSITIVE)
@option("--seed", "Seed of named workloads.", int, default=0)
@option(
    "--tokenizer",
    "A model's tokenizer.json, for prompts of text.  [default: a word is a token]",
    click.Path(path_type=Path, exists=True),
    metavar="FILE|FOLDER",
)
@json_option("every number")
@option("--html html_file", "Write one page with figures (extra `plot`).", DRAWN_FILE)
def command(
    sources: tuple[str, ...],
    requests: int | None,
    seed: int,
    tokenizer: Path | None,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Study workloads side by side: lengths, shared prefixes, key portions, arrivals and sessions.

    It shows, without any GPU, how much of your prompts a prefix cache can save. docs/howto/study-a-trace.md explains
    the result.

    \b
    Examples:
      preble workload study trace.jsonl.gz --html study.html
      preble workload study monday.jsonl tuesday.jsonl tool_use --json -
    """
    from rich.console import Console

    from preble.lab.report import print_tables
    from preble.lab.workloads.study import StudyReport, study_page, summary_tables

    if json_file == html_file == STDOUT:
        raise ConfigError("only one of --json and --html can go to stdout; name a file for the other")
    tokenize = _tokenize(tokenizer)
    studies = tuple(_studied(source, requests, seed, tokenize) for source in sources)
    report = StudyReport(sources, requests, seed, str(tokenizer) if tokenizer else None, studies)
    if tokenizer is None and any(study.has_text for study in studies):
        click.echo("a word of text counts as a token; for a model's own count give --tokenizer", err=True)
    if html_file is not None:
        write_result(html_file, study_page(report, made=made_by()).encode())
    write_json(json_file, report)
    if STDOUT not in (json_file, html_file):
        for table in summary_tables(studies):
            print_tables(Console(), table)
            click.echo()


def _studied(source: str, requests: int | None, seed: int, tokenize: Tokenize) -> Study:
    """Study one workload, with progress on stderr."""
    from preble.lab.report.progress import progress
    from preble.lab.workloads import is_endless, make_workload
    from preble.lab.workloads.study import study

    click.echo(f"reading {source}", err=True)
    workload = make_workload(source, requests or (DEFAULT_REQUESTS if is_endless(source) else None), seed)
    click.echo(f"studying {workload.name}: {len(workload.requests):,} requests", err=True)
    done = itertools.count(1)
    with progress(workload.name, "requests") as tell:
        return study(workload, tokenize=tokenize, on_request=lambda: tell(next(done), len(workload.requests)))


def _tokenize(tokenizer: Path | None) -> Tokenize:
    """Return what makes prompts token ids. Raises: ConfigError: the file is not a tokenizer."""
    from preble.lab.workloads import packed_prompt

    if tokenizer is None:
        return packed_prompt
    from preble.logs import configure_logging
    from preble.prompts.tokens.tokenizer import choose_encoder

    configure_logging("error", "console")
    encoder, _ = choose_encoder(tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer)

    def tokenize(request: WorkloadRequest) -> PackedTokens:
        prompt = request.prompt()
        return encoder.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else packed_prompt(request)

    return tokenize
