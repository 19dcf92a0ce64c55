"""`preble workload study` as a user meets it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, models, pre_tokenizers

from preble.cli import cli
from preble.lab.workloads import Segment, Workload, WorkloadRequest, write_trace
from preble.lab.workloads.study import StudyReport
from support.pages import PageReader


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["workload", "study", *arguments])


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Three requests that share four words and end with one of their own."""
    shared = Segment("shared", text="alpha beta gamma\n")
    requests = (WorkloadRequest(str(i), (shared, Segment(text=f"own{i}")), 2, arrival_s=float(i)) for i in range(3))
    write_trace(tmp_path / "trace.jsonl", Workload("words", tuple(requests), "three of them"))
    return str(tmp_path / "trace.jsonl")


def test_people_get_tables_and_see_progress_on_stderr(trace: str) -> None:
    result = run(trace, "tool_use", "--requests", "3")
    assert result.exit_code == 0, result.stderr
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in result.stdout.splitlines() if "│" in line}
    assert rows["requests"][0].strip() == "3" and len(rows["requests"]) == 2
    assert rows["prompt"][0].strip() == "5 ± 0"
    assert rows["best hit rate"][0].strip() == "53.3 %"
    assert "words: 3 requests" in result.stderr and "counts as a token" in result.stderr


def test_programs_get_every_number_and_what_was_asked_for(trace: str, tmp_path: Path) -> None:
    result = run(trace, "--json", "-", "--seed", "4")
    assert result.exit_code == 0, result.stderr
    report = msgspec.json.decode(result.stdout, type=StudyReport)
    assert (report.sources, report.seed, report.requests, report.tokenizer) == ((trace,), 4, None, None)
    assert report.version
    (study,) = report.studies
    assert study.sharing.distinct_tokens == 7 and len(study.prompt_tokens.percentiles) == 101
    file = tmp_path / "study.json"
    assert run(trace, "--json", str(file), "--seed", "4").exit_code == 0
    assert json.loads(file.read_bytes()) == json.loads(result.stdout)


@pytest.mark.slow
def test_the_page_is_written_beside_the_tables(trace: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the page is drawn with matplotlib (the extra `plot`)")
    page = tmp_path / "study.html"
    result = run(trace, "--html", str(page))
    assert result.exit_code == 0, result.stderr
    assert "best hit rate" in result.stdout
    assert "Workload study: words" in PageReader(page.read_text(encoding="utf-8")).words


def test_texts_are_counted_by_the_tokenizer_given(trace: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # every character is a token, the unknown one
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for given in (tmp_path, tmp_path / "tokenizer.json"):
        result = run(trace, "--tokenizer", str(given), "--json", "-")
        assert result.exit_code == 0, result.stderr
        report = msgspec.json.decode(result.stdout, type=StudyReport)
        assert report.studies[0].prompt_tokens.mean == len("alpha beta gamma\nown0")
        assert report.tokenizer == str(given)


def test_a_named_workload_is_the_same_for_the_same_seed() -> None:
    first, second = (run("tool_use", "--requests", "40", "--seed", seed, "--json", "-") for seed in ("1", "2"))
    again = run("tool_use", "--requests", "40", "--seed", "1", "--json", "-")
    assert first.stdout == again.stdout != second.stdout


def test_a_named_workload_has_a_default_length() -> None:
    result = run("tool_use", "--json", "-")
    assert msgspec.json.decode(result.stdout, type=StudyReport).studies[0].requests == 5000


def test_without_matplotlib_the_page_is_refused_before_any_work(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(trace, "--html", "study.html")
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.stderr and "reading" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nope",), "neither a file nor one of"),
        (("video+agent",), "preble workload make"),
        (("{trace}", "--requests", "9"), "has 3 requests, fewer than 9"),
        (("{trace}", "--tokenizer", "{trace}"), "cannot be used"),
        (("{trace}", "--json", "{trace}/study.json"), "is no folder"),
        ((), "Missing argument"),
    ],
)
def test_what_is_wrong_is_said_with_status_2(trace: str, arguments: tuple[str, ...], says: str) -> None:
    result = run(*(argument.format(trace=trace) for argument in arguments))
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
