"""The tables of docs/performance.md are the committed results, to the letter."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_is_what_the_benchmark_printed() -> None:
    spec = importlib.util.spec_from_file_location("place", ROOT / "benchmarks/micro/place.py")
    assert spec is not None and spec.loader is not None
    place = sys.modules["place"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(place)
    results = json.loads((ROOT / "benchmarks/results/place.json").read_text())["results"]
    table = "\n".join([place.HEADER, *(place.row(place.Result(**result)) for result in results)])
    assert table in (ROOT / "docs/performance.md").read_text()
    assert {(result["replicas"], result["requests"]) for result in results} >= {(4, 5000), (400, 5000), (4, 200_000)}
