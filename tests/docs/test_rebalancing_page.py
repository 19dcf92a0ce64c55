"""The numbers of docs/concepts/rebalancing.md are those of the kept results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.scripts import script

pytest.importorskip("matplotlib", reason="the benchmarks draw with matplotlib (the extra `plot`)")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "concepts" / "rebalancing.md").read_text(encoding="utf-8")


@pytest.fixture
def benchmark(request: pytest.FixtureRequest) -> Any:
    return script(f"benchmarks/repro/{request.param}.py")


def rows(table: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]


PAGE_ROWS = rows(PAGE)


@pytest.mark.parametrize("benchmark", ["burst"], indirect=True)
def test_the_table_of_the_burst_is_that_of_its_results(benchmark: Any) -> None:
    results = msgspec.json.decode(benchmark.RESULTS.read_bytes(), type=list[benchmark.Run])
    wanted = [row[1:-1] for row in rows(benchmark.table(results)) if row[0] == benchmark.VARIANTS[0].name]
    assert len(wanted) == len(benchmark.POLICIES)
    assert [row for row in wanted if row not in PAGE_ROWS] == []


@pytest.mark.parametrize("benchmark", ["hot_prefix"], indirect=True)
def test_the_table_of_the_hot_prefix_is_that_of_its_results(benchmark: Any) -> None:
    results = msgspec.json.decode(benchmark.RESULTS.read_bytes(), type=list[benchmark.ArmResult])
    wanted = [row[:8] for row in rows(benchmark.table(results))[2:]]
    assert len(wanted) == len(benchmark.ARMS)
    assert [row for row in wanted if row not in PAGE_ROWS] == []


@pytest.mark.parametrize("benchmark", ["hot_prefix"], indirect=True)
def test_the_hot_prefix_is_replicated_under_load_and_retired_after_it(benchmark: Any) -> None:
    e2, *_ = msgspec.json.decode(benchmark.RESULTS.read_bytes(), type=list[benchmark.ArmResult])
    hot_tokens = benchmark.SYSTEM_TOKENS + benchmark.tool_tokens(0)
    changes = [change for change in e2.replications if change.prefix_tokens == hot_tokens]
    calm_s, busy_s = benchmark.PHASES[0][0], benchmark.PHASES[0][0] + benchmark.PHASES[1][0]
    assert [change.added for change in changes] == sorted((change.added for change in changes), reverse=True)
    assert all(calm_s < change.time_s < busy_s for change in changes if change.added)
    assert changes[-1].num_replicas == 1
