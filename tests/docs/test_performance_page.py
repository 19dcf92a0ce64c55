"""The tables and values of the pages on performance are those of the kept results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from support.scripts import script


def benchmark(name: str) -> ModuleType:
    return script(f"benchmarks/micro/{name}.py")


@pytest.fixture(scope="module")
def performance() -> ModuleType:
    return script("benchmarks/repro/performance.py")


def test_the_tables_and_values_of_the_page_are_those_of_the_kept_results(performance: ModuleType) -> None:
    page, made = script("benchmarks/repro/page.py"), performance.made()
    texts = [path.read_text(encoding="utf-8") for path in performance.PAGES]
    assert made.keys() == set(page.names(texts[-1]))
    for text in texts:
        assert page.filled(text, made) == text, "fill it in: python benchmarks/repro/performance.py"


def test_the_figures_of_the_sizing_page_are_those_of_the_kept_result() -> None:
    sizing = script("benchmarks/repro/sizing.py")
    page, made = sizing.PAGE.read_text(encoding="utf-8"), sizing.made()
    assert set(made) == set(script("benchmarks/repro/page.py").names(page)) - {"soak"}
    assert sizing.filled(page, made) == page, "fill it in: python benchmarks/repro/sizing.py --fill"
    assert sizing.least([{"replicas": 4, "rate": 9000.0}, {"replicas": 4, "rate": 5512.0}], 4) == "5,500"


def test_the_figures_of_the_soak_are_those_of_the_kept_result_and_nothing_grows_without_end() -> None:
    soak = script("benchmarks/repro/soak.py")
    page, kept = soak.PAGE.read_text(encoding="utf-8"), msgspec.json.decode(soak.RESULT.read_bytes(), type=soak.Result)
    assert "soak" in script("benchmarks/repro/page.py").names(page)
    assert soak.filled(page, {"soak": soak.table(kept)}) == page, "fill it in: python benchmarks/repro/soak.py --fill"
    rest = [sample.resident_mb - sample.index_mb for sample in kept.samples]
    index = [sample.index_mb for sample in kept.samples]
    assert index[len(index) // 2] == pytest.approx(index[-1], rel=0.05), "the budget was reached in the first half"
    assert rest[-1] - rest[-4] < 0.05 * rest[-1], "the bar: the rest does not grow"


def test_the_kept_results_cover_small_and_large_clusters(performance: ModuleType) -> None:
    sizes = {(row.replicas, row.requests) for row in performance.place_rows()}
    assert sizes >= {(4, 5000), (400, 5000), (4, 200_000)}
    assert {compiled.replicas for compiled, _ in performance.preble_rows()} == {4, 64, 400}
    assert [run["core"] for run in performance.known("place_preble")] == ["compiled", "plain"]


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
    program, file = benchmark(name), tmp_path / "numbers.json"
    monkeypatch.setattr(program, "freeze_gc", lambda: None, raising=False)  # this process goes on
    for target in (str(file), "-"):
        monkeypatch.setattr(sys, "argv", [name, *arguments, "--json", target])
        program.main()
        printed = capsys.readouterr().out
        numbers = json.loads(printed if target == "-" else file.read_text(encoding="utf-8"))
        assert [row["requests"] for row in numbers[made]] == [int(arguments[arguments.index("--requests") + 1])]


def test_the_simulator_is_fast_near_saturation(performance: ModuleType) -> None:
    rows = performance.simulator_rows()
    assert [row.workload for row in rows] == list(benchmark("simulate").LOADS)
    assert all(row.replicas == 8 and row.busy > 0.7 and row.times_real_time > 20 for row in rows)
