"""The tables, figures and seconds of docs/concepts/e2-by-example.md are those of the scheduler.

When a figure is out of date: `python docs/figures/e2_by_example.py`, look at the result, and commit it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from support.scripts import script

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "concepts" / "e2-by-example.md").read_text(encoding="utf-8")
FIGURES = DOCS / "concepts" / "e2-by-example"
REQUESTS = ("r1", "r2", "r3", "r4", "r5", "r6", "r7")
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"


scenario = script("docs/figures/e2_scenario.py")
Table = list[dict[str, str]]


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    return {**scenario.run(), "r7-unreported": scenario.run(report_evictions=False)["r7"]}


def section(heading: str) -> str:
    """The text below the level-two heading that begins with these words."""
    found = re.search(rf"^## {re.escape(heading)}.*?\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert found is not None, f"the page has no section {heading!r}"
    return found[1]


def tables(text: str) -> Iterator[Table]:
    """Every table of a text, as rows by column name."""
    for block in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE):
        header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        yield [dict(zip(header, row, strict=True)) for row in rows]


def table_with(text: str, column: str) -> Iterator[Table]:
    return (table for table in tables(text) if column in table[0])


def cost_row(candidate: Any, chosen: str) -> dict[str, str]:
    name = f"**{candidate.replica_id}**" if candidate.replica_id == chosen else candidate.replica_id
    return {
        "replica": name,
        "matched": f"{candidate.matched_tokens:,}",
        "L": f"{candidate.load_s:.1f}",
        "M": f"{candidate.eviction_s:.1f}",
        "P": f"{candidate.prefill_s:.1f}",
        "L + M + P": f"{candidate.cost_s:.1f}",
    }


def cost_rows(step: Any) -> Table:
    return [cost_row(candidate, step.placement.replica_id) for candidate in step.placement.candidates]


@pytest.mark.parametrize("name", REQUESTS)
def test_the_cost_table_of_a_request_is_what_the_scheduler_weighed(name: str, steps: dict[str, Any]) -> None:
    first, *_ = table_with(section(f"{name}:"), "L + M + P")
    assert first == cost_rows(steps[name])


def test_the_table_of_what_would_happen_without_the_report_is_what_happens_then(steps: dict[str, Any]) -> None:
    _, second = table_with(section("r7:"), "L + M + P")
    assert second == cost_rows(steps["r7-unreported"])


def test_no_cost_is_rounded_on_the_page(steps: dict[str, Any]) -> None:
    """So that the sums can be checked in one's head."""
    for step in steps.values():
        for candidate in step.placement.candidates:
            for seconds in (candidate.load_s, candidate.eviction_s, candidate.prefill_s, candidate.cost_s):
                assert seconds == pytest.approx(round(seconds, 1), abs=1e-9)


def test_the_overview_is_what_became_of_the_requests(steps: dict[str, Any]) -> None:
    (overview,) = table_with(section("The setting"), "decision")
    assert overview == [
        {
            "request": name,
            "at (s)": f"{steps[name].ask.at:.0f}",
            "prompt": " + ".join(part.name for part in steps[name].ask.parts),
            "tokens": f"{steps[name].placement.num_prompt_tokens:,}",
            "cached": f"{steps[name].cached_tokens:,}",
            "missed": f"{steps[name].missed_tokens:,}",
            "decision": str(steps[name].placement.reason),
            "replica": steps[name].placement.replica_id,
        }
        for name in REQUESTS
    ]


def test_the_parts_have_the_sizes_of_the_setting() -> None:
    (listed,) = table_with(section("The setting"), "part")
    sizes = {name: int(row["tokens"].replace(",", "")) for row in listed for name in row["part"].split(", ")}
    assert sizes == {part.name: part.num_tokens for ask in scenario.ASKS for part in ask.parts}


def test_the_constants_of_the_setting_are_those_of_the_example() -> None:
    (listed,) = table_with(section("The setting"), "what")
    costs = scenario.CostModel(scenario.PROFILE)
    assert scenario.PROFILE.prefill_points == ((0, 0.0), (1_000, 1.0))
    assert {row["what"]: row["value"] for row in listed} == {
        "KV cache of a replica": f"{scenario.KV_TOKENS:,} tokens in blocks of {scenario.BLOCK_TOKENS}",
        "one prompt token (prefill)": f"{1000 * costs.prefill_s(1_000) / 1_000:.0f} ms of GPU time",
        "one output token": f"{1000 * costs.decode_s(1):.0f} ms of GPU time",
        "an answer": f"{scenario.OUTPUT_TOKENS} tokens: {costs.decode_s(scenario.OUTPUT_TOKENS):.1f} s",
        "window H": "180 s",
    }


def test_what_a_evicted_for_r6_is_what_m_had_foreseen(steps: dict[str, Any]) -> None:
    step = steps["r6"]
    before, after = scenario.held_parts(step.tree, "A"), scenario.held_parts(step.tree_after, "A")
    users = {node.parts[0].name: node.shares.get("A", 0) for top in step.tree for node in top.walk()}
    evicted = {name: tokens - after.get(name, 0) for name, tokens in before.items() if tokens > after.get(name, 0)}
    costs = {name: tokens / 1_000 * users[name] / step.num_requests["A"] for name, tokens in evicted.items()}
    (listed,) = table_with(section("r6:"), "evicted on A")
    assert sorted(listed, key=lambda row: row["evicted on A"]) == [
        {
            "evicted on A": name,
            "tokens": str(evicted[name]),
            "used by": str(users[name]),
            "of requests on A": str(step.num_requests["A"]),
            "M": f"{costs[name]:.1f}",
        }
        for name in sorted(evicted)
    ]
    assert sum(costs.values()) == pytest.approx(step.placement.candidates[0].eviction_s)


@pytest.mark.parametrize("name", REQUESTS)
def test_the_seconds_in_the_text_are_costs_of_the_example(name: str, steps: dict[str, Any]) -> None:
    """A cost of any replica so far, or L + P without M."""
    candidates = [c for earlier in REQUESTS[: REQUESTS.index(name) + 1] for c in steps[earlier].placement.candidates]
    known = {f"{scenario.OUTPUT_TOKENS / 1000:.1f}"}
    for c in candidates:
        parts = (c.load_s, c.eviction_s, c.prefill_s, c.cost_s, c.load_s + c.prefill_s)
        known |= {f"{seconds:.1f}" for seconds in parts}
    text = re.sub(r"^\|.*$", "", section(f"{name}:"), flags=re.MULTILINE)
    assert set(re.findall(r"\b\d+\.\d\b", text)) <= known


def test_the_free_memory_in_the_text_of_r6_is_what_is_free(steps: dict[str, Any]) -> None:
    held = {name: sum(scenario.held_parts(steps["r6"].tree, name).values()) for name in "AB"}
    assert held["A"] == held["B"]
    needed = steps["r6"].placement.num_prompt_tokens + scenario.OUTPUT_TOKENS
    free = scenario.KV_TOKENS - held["A"]
    numbers = {"held": held["A"], "needed": needed, "free": free, "excess": needed - free}
    made = {f"value:{name}": f"{number:,}" for name, number in numbers.items()}
    assert script("benchmarks/repro/page.py").filled(PAGE, made) == PAGE


def test_m_alone_turns_r6_from_b_to_a(steps: dict[str, Any]) -> None:
    candidates = steps["r6"].placement.candidates
    assert min(candidates, key=lambda c: c.load_s + c.prefill_s).replica_id == "B"
    assert min(candidates, key=lambda c: c.cost_s).replica_id == "A"


def test_every_figure_is_shown_once_and_nothing_else_lies_there() -> None:
    shown = re.findall(r"\]\(e2-by-example/([\w-]+\.svg)\)", PAGE)
    assert sorted(shown) == sorted(path.name for path in FIGURES.iterdir())


@pytest.mark.parametrize("name", [*REQUESTS, "r7-unreported"])
def test_a_figure_shows_what_the_scheduler_does_today(name: str, steps: dict[str, Any]) -> None:
    description = ElementTree.parse(FIGURES / f"{name}.svg").find(f".//{DESCRIPTION}")
    assert description is not None and description.text is not None
    assert json.loads(description.text) == json.loads(json.dumps(steps[name].data()))


def test_the_script_draws_what_is_committed(tmp_path: Path, steps: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    drawing = script("docs/figures/e2_by_example.py")
    assert {f"{name}.svg" for name, _, _ in drawing.figures()} == {path.name for path in FIGURES.iterdir()}
    drawing.save(tmp_path, "r6", steps["r6"])
    drawn, committed = (ElementTree.parse(folder / "r6.svg") for folder in (tmp_path, FIGURES))
    for tag in (DESCRIPTION, "{http://www.w3.org/2000/svg}g"):
        assert len(drawn.findall(f".//{tag}")) == len(committed.findall(f".//{tag}"))
