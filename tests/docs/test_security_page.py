"""What SECURITY.md refers to is there, and every link to a heading leads to one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_each_defence_is_told_where_the_page_says() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    missing = []
    for target in re.findall(r"\]\(([^)]+)\)", page) + re.findall(r"`(tests/[^`]+)`", page):
        name, _, anchor = target.partition("#")
        file = ROOT / (name or "SECURITY.md")
        if not file.is_file() or (anchor and anchor not in anchors(file)):
            missing.append(target)
    assert missing == []
