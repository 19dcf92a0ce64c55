"""The selection service's cost on its page, compared with the kept result."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from unittest import mock

import msgspec

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_kept_result() -> None:
    with mock.patch.object(sys, "path", [str(ROOT / "benchmarks" / "micro"), *sys.path]):
        selection_cost = importlib.import_module("selection_cost")
    kept = msgspec.json.decode((ROOT / "benchmarks" / "results" / "selection.json").read_bytes())
    rows = msgspec.convert(kept["costs"], list[selection_cost.Cost])  # type: ignore[name-defined]
    page = (ROOT / "docs" / "howto" / "selection-service.md").read_text(encoding="utf-8")
    assert f"<!-- selection-cost -->\n```\n{selection_cost.table(rows)}\n```\n<!-- end -->" in page
