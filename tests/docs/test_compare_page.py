"""docs/howto/compare-policies.md shows what its kept results say, and these are what Preble computes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from preble.lab.compare import CompareResult, read_result
from preble.lab.compare.numbers import caution
from support import scripts

pytest.importorskip("matplotlib", reason="the script draws with matplotlib (the extra `plot`)")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "compare-policies.md").read_text(encoding="utf-8")


@pytest.fixture
def script() -> Any:
    return scripts.script("benchmarks/repro/compare_example.py")


@pytest.fixture
def kept(script: Any) -> CompareResult:
    return read_result(script.RESULTS)


def test_the_table_on_the_page_is_what_a_terminal_shows(kept: CompareResult, script: Any) -> None:
    assert kept.is_complete and not kept.other_runs
    assert f"{script.shown(kept)}\n```" in PAGE


def test_the_page_has_the_caution_that_the_command_ends_with(kept: CompareResult, script: Any) -> None:
    assert " ".join(caution(kept, script.WORKLOAD).split()) in " ".join(PAGE.split())


def test_curves_are_named_in_the_order_of_the_bars(kept: CompareResult, script: Any) -> None:
    drawn = script.curve_drawing(kept, script.WORKLOAD, script.TTFT_P99).svg
    ranked = [one.policy for one in kept.standings_of(script.WORKLOAD)]
    assert re.findall(f">({'|'.join(ranked)})<", drawn) == ranked


def test_the_command_on_the_page_is_the_plan_of_the_results(kept: CompareResult, script: Any) -> None:
    from preble.cli import cli
    from preble.cli.compare import _plan, command

    [line] = [part for part in PAGE.split("```") if part.startswith("console\n$ preble compare")]
    shown = line.removeprefix("console\n$ ").partition("\ntoolbench")[0].replace("\\\n", "")
    group = click.Context(cli, **cli.context_settings)
    options = command.make_context("compare", shlex.split(shown)[2:], parent=group).params
    for name in ("json_file", "html", "jobs"):
        options.pop(name)
    asked, run, meant = map(msgspec.to_builtins, (_plan(**options), kept.plan, script.example()))
    assert asked == run == meant
