"""Everything in tests that stands for something real is on the list of tests/README.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS / "README.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([\w/]+(?:\.py)?)`", PAGE))
ROWS = [row.split("|")[1:-1] for row in PAGE.splitlines() if row.startswith("| `")]
PLAYS_A_PART = re.compile(
    r"^class (?:Fake\w*|\w*(?:Server|Handler|Publisher|Peer|Receiver|Transport|Loop|ByHand))\b", re.M
)


def helpers() -> list[str]:
    """Modules that are no tests, and tests with a class whose name says that it plays the part of another program."""
    return [
        str(path.relative_to(TESTS))
        for path in sorted(TESTS.rglob("*.py"))
        if path.name not in ("__init__.py", "__main__.py", "conftest.py")
        and (not path.name.startswith("test_") or PLAYS_A_PART.search(path.read_text(encoding="utf-8")))
    ]


@pytest.mark.parametrize("path", helpers())
def test_what_plays_a_part_is_on_the_list(path: str) -> None:
    assert NAMED & {path, str(Path(path).parent)}, "say in tests/README.md what it stands for and what compares the two"


def test_what_is_on_the_list_is_there() -> None:
    assert {name for name in NAMED if "/" in name and not (TESTS / name).exists()} == set()


@pytest.mark.parametrize("row", ROWS, ids=[row[0].strip() for row in ROWS])
def test_each_stand_in_names_its_comparison_or_says_that_there_is_none(row: list[str]) -> None:
    assert re.search(r"nothing|`\w+/test_|fakes\.py|fidelity|real", row[2])
