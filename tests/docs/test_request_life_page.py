from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path

import pytest

from preble.gateway.requests.states import NEXT
from preble.serving import Placed, Serving

PAGES = Path(__file__).parents[2] / "docs" / "concepts"
LIFE = (PAGES / "request-life.md").read_text(encoding="utf-8")
SERVING = (PAGES / "serving.md").read_text(encoding="utf-8")
NAME = re.compile(r"`((?:gateway|serving|prompts|rules|core|decisions|engines|errors|web)(?:\.\w+)+)`")
NAMES = sorted(set(NAME.findall(LIFE)))


def test_the_page_names_the_code_in_eight_steps() -> None:
    assert len(NAMES) > 15
    assert len(re.findall(r"^## \d\. ", LIFE, re.MULTILINE)) == 8


@pytest.mark.parametrize("name", NAMES)
def test_a_name_on_the_page_exists(name: str) -> None:
    assert pkgutil.resolve_name(f"preble.{name}") is not None


def test_the_page_has_the_table_of_states() -> None:
    rows = re.findall(r"^\| `([A-Z]+)` \| `([A-Z]+)` \| (.+) \|$", LIFE, re.MULTILINE)
    assert rows == [(state.name, after.name, when) for state, steps in NEXT.items() for after, when in steps.items()]


@pytest.mark.parametrize("of", [Serving, Placed])
def test_the_serving_page_lists_the_whole_interface(of: type) -> None:
    [table] = re.findall(rf"^\| `{of.__name__}` \| \|\n((?:\|.*\n)+)", SERVING, re.MULTILINE)
    listed = {name for row in table.splitlines() for name in re.findall(r"`(\w+)[^`]*`", row.split("|")[1])}
    attributes = (
        {"admitted", "ids", "members", "place", "replicas", "scheduler", "recent", "stored", "telemetry"}
        if of is Serving
        else set()
    )
    public = {name for name in dir(of) if not name.startswith("_")}
    assert listed == public | attributes, inspect.getmodule(of)
