from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "request-life.md"
NAME = re.compile(r"`((?:gateway|core|decisions|engines|errors)(?:\.\w+)+)`")
NAMES = sorted(set(NAME.findall(PAGE.read_text(encoding="utf-8"))))


def test_the_page_names_the_code_in_eight_steps() -> None:
    assert len(NAMES) > 15
    assert len(re.findall(r"^## \d\. ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)) == 8


@pytest.mark.parametrize("name", NAMES)
def test_a_name_on_the_page_exists(name: str) -> None:
    assert pkgutil.resolve_name(f"preble.{name}") is not None
