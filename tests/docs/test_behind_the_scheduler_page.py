"""The figure, the numbers and the names of docs/concepts/behind-the-scheduler.md are those of the scheduler.

When they are out of date: `python docs/figures/behind_the_scheduler.py`, look at the result, and commit it.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from support.scripts import script

SOURCE = Path(__file__).parents[2] / "src" / "preble"
figure = script("docs/figures/behind_the_scheduler.py")
PAGE = figure.PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def followed() -> Any:
    return figure.run()


def test_the_numbers_of_the_page_are_those_of_the_scheduler(followed: Any) -> None:
    made = figure.made(followed)
    assert made.keys() == set(script("benchmarks/repro/page.py").names(PAGE))
    assert figure.filled(PAGE, made) == PAGE


def test_the_figure_is_that_of_the_script(followed: Any) -> None:
    assert figure.FIGURE.read_text(encoding="utf-8") == figure.drawing(followed)


def test_the_request_ends_without_a_trace_but_its_prefix(followed: Any) -> None:
    before, after = followed.moments[0], followed.moments[-1]
    assert (after.in_flight, after.waiting_tokens, after.load_s, after.pending_reports) == (0, 0, 0.0, 0)
    assert after.tree_tokens == before.tree_tokens + followed.placement.num_prompt_tokens - before.usable_tokens


def test_every_part_of_the_figure_is_in_the_table_and_in_the_code(followed: Any) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| `(core\.[\w.]+)` \|$", PAGE, flags=re.MULTILINE))
    assert all(hasattr(importlib.import_module(f"preble.{module}"), name) for name, module in rows.items())
    assert {box.title for box in figure.boxes(followed)} | {"ClusterState"} == rows.keys()


def test_every_file_that_the_page_names_exists() -> None:
    files = re.findall(r"`(core/[\w/]+\.py)`", PAGE)
    assert files and [file for file in files if not (SOURCE / file).is_file()] == []
