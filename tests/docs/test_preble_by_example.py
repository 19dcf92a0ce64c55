"""The tables, values and figures of docs/concepts/preble-by-example.md are those of the policy.

When they are out of date: `python docs/figures/preble_by_example.py`, look at the result, and commit it.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from support.scripts import script

pytest.importorskip("matplotlib", reason="the figures need matplotlib (the extra `plot`)")

figure = script("docs/figures/preble_by_example.py")


@pytest.fixture(scope="module")
def example() -> Any:
    return figure.run()


def test_the_tables_and_values_of_the_page_are_those_of_the_policy(example: Any) -> None:
    page, made = figure.PAGE.read_text(encoding="utf-8"), figure.made(example)
    assert made.keys() == set(script("benchmarks/repro/page.py").names(page))
    assert figure.filled(page, made) == page


def is_pinned(library: str) -> bool:
    pins = (Path(__file__).parents[2] / "requirements" / "constraints.txt").read_text()
    return re.search(rf"^{library}=={re.escape(version(library))}$", pins, re.MULTILINE) is not None


@pytest.mark.skipif(not is_pinned("matplotlib"), reason="another matplotlib than the pinned one draws otherwise")
def test_the_figures_are_those_of_the_script(example: Any) -> None:
    drawn = {name: drawing.standalone() for name, drawing in figure.drawings(example).items()}
    assert {path.stem: path.read_text(encoding="utf-8") for path in figure.FOLDER.glob("*.svg")} == drawn


@pytest.mark.parametrize(
    ("name", "reason", "replica"),
    [
        ("p1", "explore", "A"),
        ("p2", "exploit", "A"),
        ("p3", "explore", "A"),
        ("p4", "replicate", "B"),
        ("p5", "explore", "C"),
    ],
)
def test_each_request_goes_where_the_headings_say(example: Any, name: str, reason: str, replica: str) -> None:
    placement = example.steps[name].placement
    assert (placement.reason, placement.replica_id) == (reason, replica)


def test_the_sum_decides(example: Any) -> None:
    for step in (*example.steps.values(), *example.burst):
        costs = {candidate.replica_id: candidate.cost_s for candidate in step.placement.candidates}
        assert costs[step.placement.replica_id] == min(costs.values())


def test_a_copy_gets_cheaper_while_the_prefix_is_used_and_the_third_replica_gets_one(example: Any) -> None:
    to_compute = [figure._of_c(step).prefill_s for step in example.burst[2 : example.copying + 1]]
    assert to_compute == sorted(to_compute, reverse=True)
    assert {step.placement.replica_id for step in example.burst[: example.copying]} == {"A", "B"}
    assert example.burst[example.copying].placement.replica_id == "C"
