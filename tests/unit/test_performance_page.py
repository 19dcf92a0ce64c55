"""The tables of docs/performance.md are the committed results, to the letter."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.scripts import script

ROOT = Path(__file__).parents[2]


def benchmark(name: str) -> ModuleType:
    return script(f"benchmarks/micro/{name}.py")


def test_the_table_is_what_the_benchmark_printed() -> None:
    place = benchmark("place")
    results = json.loads((ROOT / "benchmarks/results/place.json").read_text())["results"]
    table = "\n".join([place.HEADER, *(place.row(place.Result(**result)) for result in results)])
    assert table in (ROOT / "docs/performance.md").read_text()
    assert {(result["replicas"], result["requests"]) for result in results} >= {(4, 5000), (400, 5000), (4, 200_000)}


@pytest.mark.parametrize(
    ("name", "arguments", "made"),
    [
        ("place", ["--trace", "tool_use", "--replicas", "2", "--requests", "50"], "results"),
        ("simulate", ["--workload", "toolbench", "--requests", "5", "--runs", "1"], "rows"),
    ],
)
def test_a_benchmark_writes_its_numbers_to_a_file_or_in_place_of_its_text(
    name: str,
    arguments: list[str],
    made: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, file = benchmark(name), tmp_path / "new" / "numbers.json"
    monkeypatch.setattr(program, "freeze_gc", lambda: None, raising=False)  # this process goes on
    for target in (str(file), "-"):
        monkeypatch.setattr(sys, "argv", [name, *arguments, "--json", target])
        program.main()
        printed = capsys.readouterr().out
        numbers = json.loads(printed if target == "-" else file.read_text(encoding="utf-8"))
        assert [row["requests"] for row in numbers[made]] == [int(arguments[arguments.index("--requests") + 1])]


def test_the_simulators_speed_is_what_the_benchmark_printed() -> None:
    """On the page for every workload that the benchmark has, near saturation, and over what is promised."""
    module = benchmark("simulate")
    rows = [module.Row(**row) for row in json.loads((ROOT / "benchmarks/results/simulate.json").read_text())["rows"]]
    assert "\n".join(map(str, rows)) in (ROOT / "docs/performance.md").read_text()
    assert [row.workload for row in rows] == list(module.LOADS)
    assert all(row.replicas == 8 and row.busy > 0.7 and row.times_real_time > 20 for row in rows)


def test_the_default_policys_placements_are_told_as_they_were_measured() -> None:
    compiled, plain = json.loads((ROOT / "benchmarks/results/place_preble.json").read_text())
    assert (compiled["core"], plain["core"]) == ("compiled", "plain")
    rates = {(row["trace"], row["replicas"]): row["rate"] for row in compiled["results"]}
    hundreds = {key: f"{round(rate, -2):,.0f}" for key, rate in rates.items()}
    ratios = [rates[row["trace"], row["replicas"]] / row["rate"] for row in plain["results"]]
    page = " ".join((ROOT / "docs/performance.md").read_text(encoding="utf-8").split())
    tools, video = ([hundreds[trace, replicas] for replicas in (4, 64, 400)] for trace in ("tool_use", "video"))
    assert f"{tools[0]}, {tools[1]} and {tools[2]} a second for tool use" in page
    assert f"{video[0]}, {video[1]} and {video[2]} for video; {min(ratios):.1f} to {max(ratios):.1f} times" in page
