"""Values that commands fill in on pages, between HTML comments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_begins_with_a_value(page: Path) -> None:
    """Markdown would end the paragraph or the list there."""
    assert re.findall(r"^ *<!-- value:.*", page.read_text(encoding="utf-8"), re.MULTILINE) == []
