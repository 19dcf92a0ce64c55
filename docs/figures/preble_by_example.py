"""Draw and fill in docs/concepts/preble-by-example.md from what the policy `preble` does.

    python docs/figures/preble_by_example.py

The setting is that of docs/concepts/e2-by-example.md, but each further sequence makes a decode iteration longer. Only
prompts, sizes and times go in; placements and costs come out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks" / "repro"))

import e2_scenario as scenario  # noqa: E402
from page import fenced, filled, markdown  # noqa: E402

from preble.core.types import Candidate, RequestId  # noqa: E402
from preble.core.types.life import Started  # noqa: E402
from preble.decisions.explain import explain  # noqa: E402
from preble.decisions.recent import PlacedAt, RecentDecisions  # noqa: E402
from preble.lab.report import PALETTE, Drawing, Table, draw  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE = ROOT / "docs" / "concepts" / "preble-by-example.md"
FOLDER = PAGE.with_suffix("")
PROFILE = replace(scenario.PROFILE, decode_s_per_sequence=0.0005)
COSTS = ("to wait", "to evict", "to compute")
BURST_AT_S, BURST_EVERY_S, BURST = 40.0, 0.2, 40
FIRST_TOKEN_S = 0.1


@dataclass(frozen=True, slots=True)
class Example:
    """`steps`: the five single requests, by name. `burst`: the requests for one tool that follow."""

    steps: Mapping[str, scenario.Step]
    burst: Sequence[scenario.Step]

    @property
    def copying(self) -> int:
        """Index of the first request of the burst that goes to a replica which did not hold its prefix."""
        return next(i for i, step in enumerate(self.burst) if step.placement.reason == "replicate")


def question(name: str, at: float, tokens: int = 300) -> scenario.Ask:
    """A request about the weather tool, with a text of its own."""
    return scenario.Ask(name, at, (scenario.SYSTEM, scenario.WEATHER, scenario.Part(name, tokens)))


def play(seed: int) -> Example | None:
    """The example with ties broken by this seed; None if the first request does not go to A."""
    cluster = scenario.Cluster(seed, policy="preble", profile=PROFILE)
    steps = {"p1": cluster.serve(question("p1", 0.0))}
    if steps["p1"].placement.replica_id != "A":
        return None
    steps["p2"] = cluster.serve(question("p2", 10.0))
    steps["p3"] = cluster.hold(question("p3", 20.0, 4_000))
    steps["p4"] = cluster.serve(question("p4", 20.0))
    steps["p5"] = cluster.serve(scenario.Ask("p5", 26.0, (scenario.Part("contract", 5_700),)))
    cluster.scheduler.on_first_token(RequestId("p3"), 35.0)
    cluster.scheduler.on_finish(RequestId("p3"), scenario.OUTPUT_TOKENS, 36.0)
    return Example(steps, list(burst(cluster)))


def burst(cluster: scenario.Cluster) -> Iterator[scenario.Step]:
    """Many requests for the weather tool, whose answers are all still being made."""
    for i in range(BURST):
        at = BURST_AT_S + i * BURST_EVERY_S
        yield cluster.hold(question(f"b{i + 1}", at))
        cluster.scheduler.on_first_token(RequestId(f"b{i + 1}"), at + FIRST_TOKEN_S)


def run() -> Example:
    """The example. Ties are broken at random: of all seeds, the first with which the first request goes to A."""
    return next(example for seed in range(1_000) if (example := play(seed)) is not None)


# -- tables ---------------------------------------------------------------------------------------------------------


def overview(example: Example) -> Table:
    """The requests, and where each went."""
    return Table(
        ("request", "at", "prompt", "tokens", "cached", "decision", "replica"),
        [
            (
                name,
                f"{step.ask.at:.0f} s",
                " + ".join(part.name for part in step.ask.parts),
                f"{step.placement.num_prompt_tokens:,}",
                f"{step.cached_tokens:,}",
                str(step.placement.reason),
                str(step.placement.replica_id),
            )
            for name, step in example.steps.items()
        ],
        caption="*Cached*: the longest beginning of the prompt that any replica holds.",
    )


def costs_table(step: scenario.Step) -> Table:
    """What the policy computed for each replica."""
    rows = []
    for c in step.placement.candidates:
        name = f"**{c.replica_id}**" if c.replica_id == step.placement.replica_id else str(c.replica_id)
        numbers = (c.load_s, c.eviction_s, c.prefill_s, c.cost_s)
        rows.append((name, f"{c.matched_tokens:,}", *(f"{number:.1f}" for number in numbers)))
    return Table(("replica", "cached", *COSTS, "sum"), rows, caption="Seconds of delay, of all requests together.")


def explained(step: scenario.Step) -> str:
    """What `preble explain` prints about this placement."""
    recent = RecentDecisions("preble", 1)
    recent.on(PlacedAt(step.placement, step.ask.at), Started(), step.ask.at)
    return explain(recent.of_request(step.ask.name)[0])


def made(example: Example) -> dict[str, str]:
    """Everything on the page that the policy computed, by marker."""
    copied = example.burst[example.copying]
    tables = {name: markdown(costs_table(step)) for name, step in example.steps.items()}
    tables |= {"copied": markdown(costs_table(copied)), "overview": markdown(overview(example))}
    first, last = (_of_c(step).prefill_s for step in (example.burst[0], copied))
    return tables | {
        "explained": fenced(explained(example.steps["p4"])),
        "value:p1": f"{example.steps['p1'].placement.candidates[0].prefill_s:.1f} s",
        "value:p2": f"{example.steps['p2'].placement.candidates[0].prefill_s:.1f} s",
        "value:p4": f"{example.steps['p4'].placement.candidates[0].load_s:.1f} s",
        "value:copying": str(example.copying + 1),
        "value:copy-first": f"{first:.1f} s",
        "value:copy-last": f"{last:.1f} s",
    }


def _of_c(step: scenario.Step) -> Candidate:
    return next(candidate for candidate in step.placement.candidates if candidate.replica_id == "C")


# -- figures --------------------------------------------------------------------------------------------------------


def draw_step(step: scenario.Step) -> Drawing:
    """A stacked bar for each replica: the three costs."""

    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        candidates = list(step.placement.candidates)
        longest = max(candidate.cost_s for candidate in candidates)
        for y, c in enumerate(candidates):
            _stack(axes, y, (c.load_s, c.eviction_s, c.prefill_s), longest)
            chosen = "  ◀ chosen" if c.replica_id == step.placement.replica_id else ""
            axes.text(c.cost_s + 0.012 * longest, y, f"{c.cost_s:.1f} s{chosen}", va="center", fontsize="small")
        axes.set_yticks(range(len(candidates)), [str(candidate.replica_id) for candidate in candidates])
        axes.set(xlim=(0, longest * 1.2), ylim=(len(candidates) - 0.5, -0.5), xlabel="seconds of delay")
        axes.grid(visible=False, axis="y")
        handles = [axes.barh(0, 0, color=colour, label=name) for name, colour in zip(COSTS, PALETTE, strict=False)]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(COSTS))

    return draw(fill, width_in=7.6, height_in=2.1)


def _stack(axes: Axes, y: int, costs: Sequence[float], longest: float) -> None:
    left = 0.0
    for cost, colour in zip(costs, PALETTE, strict=False):
        axes.barh(y, cost, left=left, height=0.62, color=colour)
        if cost > 0.05 * longest:
            axes.text(left + cost / 2, y, f"{cost:.1f}", ha="center", va="center", fontsize="small")
        left += cost


def draw_burst(example: Example) -> Drawing:
    """What each request of the burst would have cost on each replica; dots where it went."""

    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        for colour, replica_id in zip(PALETTE, scenario.REPLICAS, strict=False):
            points = [
                (i + 1, candidate.cost_s, step.placement.replica_id == replica_id)
                for i, step in enumerate(example.burst)
                for candidate in step.placement.candidates
                if candidate.replica_id == replica_id
            ]
            axes.plot([x for x, _, _ in points], [y for _, y, _ in points], color=colour, label=f"on {replica_id}")
            chosen = [(x, y) for x, y, is_chosen in points if is_chosen]
            axes.plot([x for x, _ in chosen], [y for _, y in chosen], "o", color=colour, markersize=5)
        axes.axvline(example.copying + 1, linestyle=":", color=PALETTE[-1])
        axes.set(xlabel="request of the burst (a dot: it went there)", ylabel="seconds of delay", ylim=(0, None))
        axes.legend(loc="upper right", ncols=3)

    return draw(fill, width_in=7.6, height_in=3.2)


def drawings(example: Example) -> dict[str, Drawing]:
    """Every figure of the page, by file name."""
    return {name: draw_step(step) for name, step in example.steps.items()} | {"burst": draw_burst(example)}


def main() -> None:
    example = run()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, drawing in drawings(example).items():
        (FOLDER / f"{name}.svg").write_text(drawing.standalone(), encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), made(example)), encoding="utf-8")


if __name__ == "__main__":
    main()
