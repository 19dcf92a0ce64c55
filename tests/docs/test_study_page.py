"""docs/howto/study-a-trace.md shows what its kept results say, and these are what Preble computes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from preble.lab.workloads import make_workload
from preble.lab.workloads.study import StudyReport, study
from support import scripts

pytest.importorskip("matplotlib", reason="the script draws with matplotlib (the extra `plot`)")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "study-a-trace.md").read_text(encoding="utf-8")


@pytest.fixture
def script() -> Any:
    return scripts.script("benchmarks/repro/study.py")


@pytest.fixture
def kept(script: Any) -> StudyReport:
    return msgspec.json.decode(script.RESULTS.read_bytes(), type=StudyReport)


def test_the_table_on_the_page_is_what_a_terminal_shows(kept: StudyReport, script: Any) -> None:
    assert f"{script.shown(kept)}\n```" in PAGE


def test_the_command_on_the_page_has_the_workloads_of_the_results(kept: StudyReport, script: Any) -> None:
    assert f"preble workload study {' '.join(kept.sources)} " in PAGE
    assert (kept.sources, kept.requests, kept.seed) == (script.SOURCES, script.REQUESTS, script.SEED)


def test_every_figure_of_the_script_is_on_the_page(script: Any) -> None:
    assert {f"study-a-trace/{name}.svg" for name in script.DRAWN} == set(re.findall(r"\]\((\S+\.svg)\)", PAGE))


@pytest.mark.parametrize("name", ["toolbench", "video"])
def test_the_kept_results_are_those_of_this_version(kept: StudyReport, name: str) -> None:
    """Where this fails, run benchmarks/repro/study.py."""
    before = kept.studies[kept.sources.index(name)]
    now = study(make_workload(name, kept.requests, kept.seed))
    assert now.sharing.prompt_tokens == before.sharing.prompt_tokens
    assert now.sharing.distinct_tokens == before.sharing.distinct_tokens
    assert now.sharing.key_portions.nodes == before.sharing.key_portions.nodes
    assert now.sharing.fraction.mean == pytest.approx(before.sharing.fraction.mean)


def test_the_example_in_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.+?)```", PAGE, flags=re.DOTALL)
    exec(compile(example, "study-a-trace.md", "exec"), {})
    assert re.fullmatch(r"\d\d% of [\d,]+ prompt tokens are shared\n", capsys.readouterr().out)
