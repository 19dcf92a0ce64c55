"""Each script of benchmarks says what it does with `--help`, and does nothing then."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from support.scripts import ROOT

pytest.importorskip("matplotlib", reason="some draw with matplotlib (the extra `plot`)")

NEEDS_MORE = {"gpu_profile": "torch on a GPU", "vllm_order": "vLLM"}
COMMANDS = [
    path
    for folder in ("repro", "micro")
    for path in sorted((ROOT / "benchmarks" / folder).glob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8") and path.stem not in NEEDS_MORE
]


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_a_benchmark_that_is_asked_for_help_runs_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.syspath_prepend(path.parent)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {path.name}")
