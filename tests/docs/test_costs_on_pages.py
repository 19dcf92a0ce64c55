"""What the endpoint picker and the selection service cost, on their pages, compared with the kept results."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from support.scripts import script

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("name", "page"), [("picker", "kubernetes-gateway"), ("selection", "selection-service")])
def test_the_page_shows_the_kept_result(name: str, page: str) -> None:
    cost = script(f"benchmarks/micro/{name}_cost.py")
    kept = msgspec.json.decode((ROOT / "benchmarks" / "results" / f"{name}.json").read_bytes())
    rows = msgspec.convert(kept["costs"], list[cost.Cost])  # type: ignore[name-defined]
    shown = (ROOT / "docs" / "howto" / f"{page}.md").read_text(encoding="utf-8")
    assert f"<!-- {name}-cost -->\n```\n{cost.table(rows)}\n```\n<!-- end -->" in shown
