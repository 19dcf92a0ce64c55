"""The examples of docs/howto/bring-your-trace.md, run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from preble.lab.workloads import read_trace
from preble.lab.workloads.loaders import format_names

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "bring-your-trace.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r'```(?:json|csv) title="([^"]+)"\n(.*?)```', PAGE, flags=re.DOTALL))


def written(folder: Path, name: str) -> Path:
    """The example of a format as a file, with what has to lie beside it."""
    (folder / "day.segments.jsonl").write_text(EXAMPLES["segments, NAME.segments.jsonl"])
    path = folder / "day.requests.jsonl"
    path.write_text(EXAMPLES[name])
    return path


def test_every_format_has_a_row_and_an_example() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\(#", PAGE, flags=re.MULTILINE)
    assert sorted(rows) == sorted(format_names())
    assert {name.split(",")[0] for name in EXAMPLES} == set(format_names())


@pytest.mark.parametrize("name", format_names())
def test_an_example_is_recognised_and_loaded(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, name)
    workload = read_trace(path)
    assert workload == read_trace(path, format=name)
    assert workload.requests


@pytest.mark.parametrize(("name", "shared"), [("mooncake", 512), ("servegen", 489), ("segments", 3000)])
def test_an_example_shares_what_the_page_says(tmp_path: Path, name: str, shared: int) -> None:
    first, second = read_trace(written(tmp_path, name)).requests
    assert first.segments[0] is second.segments[0]
    assert first.segments[0].num_tokens == shared


def test_the_python_example_writes_the_bursts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mooncake.jsonl").write_text(EXAMPLES["mooncake"].replace("3000", "0"))
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(code, "bring-your-trace.md", "exec"), {})
    assert [request.arrival_s for request in read_trace(Path("bursts.jsonl.gz")).requests] == [0.0, 0.0]
