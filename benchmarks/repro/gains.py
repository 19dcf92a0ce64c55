"""What a fleet gains: the requests/s it serves within a latency limit, and its time to first token.

    python benchmarks/repro/gains.py           # simulate (13 min of CPU, core compiled), then fill in and draw
    python benchmarks/repro/gains.py --draw    # fill in the pages and draw from the kept results

`preble`, round robin and least load on the paper's workloads in steady state, on four A6000 with Mistral-7B. First each
policy's capacity is searched. Then all three get the same requests at a rate that each of them carries. Simulated runs
are kept in build/gains, so that an interrupted one goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grid
import msgspec
from made_by import note, policy_digest
from page import EVALUATION, fill, markdown

from preble.lab.compare import compare_policies
from preble.lab.compare.numbers import TTFT_MEAN
from preble.lab.report import PALETTE, Drawing, Table, draw
from preble.lab.report.formats import significant
from preble.lab.report.progress import progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "gains.json"
KEPT = ROOT / "build" / "gains" / policy_digest()
PAGES = (ROOT / "docs" / "index.md", *EVALUATION)
FIGURES = ROOT / "docs" / "assets"
POLICIES = ("preble", "least_load", "round_robin")
NAMES = {"preble": "Preble", "least_load": "least load", "round_robin": "round robin"}
WORKLOADS = ("toolbench", "video", "programming", "longdoc", "multiturn")
"""All of the paper's but the embodied agent, which takes a day to simulate so; and conversations."""
SHARE = 0.8
"""Of the lowest of the three capacities: the rate at which times are compared."""


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """One workload. `limit_s`: on the p99 of TTFT. `seeds`: how many. By policy: `carried_rps`, and `ttft_s`, the mean
    at `rate` requests/s."""

    workload: str
    title: str
    limit_s: float
    seeds: int
    rate: float
    carried_rps: dict[str, float]
    ttft_s: dict[str, float]

    def times(self, other: str) -> float:
        """Return how many times what `other` carries `preble` carries."""
        return self.carried_rps["preble"] / self.carried_rps[other]

    def sooner(self, other: str) -> float:
        """Return how many times as long `other` takes to the first token as `preble`."""
        return self.ttft_s[other] / self.ttft_s["preble"]


def measure(name: str, seeds: Sequence[int]) -> Gain:
    """Simulate one workload."""
    cell = grid.CELLS[f"case-{name}"]
    searched = cell.plan(POLICIES, tuple(seeds), (SHARE,))
    with progress(name, "runs") as on_progress:
        result = compare_policies(searched, path=KEPT / f"{name}.json", jobs=1, on_progress=on_progress)
    carried = {one.policy: one.capacity_rps.mean for one in result.standings}
    rate = float(significant(SHARE * min(carried.values()), 3))
    same = msgspec.structs.replace(searched, rates=(rate,))
    with progress(f"{name} at {rate:g}/s", "runs") as on_progress:
        result = compare_policies(same, path=KEPT / f"{name}-same-rate.json", jobs=1, on_progress=on_progress)
    ttft_s = {policy: TTFT_MEAN.over(result.runs_of(cell.name, policy)[rate]) for policy in POLICIES}
    return Gain(
        workload=name,
        title=cell.title.partition(",")[0],
        limit_s=cell.slo.ttft_p99_s or 0.0,
        seeds=len(seeds),
        rate=rate,
        carried_rps=carried,
        ttft_s={policy: found.mean for policy, found in ttft_s.items() if found is not None},
    )


def known_gains() -> list[Gain]:
    return msgspec.json.decode(RESULT.read_bytes(), type=list[Gain])


def values(gains: Sequence[Gain]) -> dict[str, str]:
    """Return what pages quote, by marker."""

    def span(factors: Sequence[float]) -> str:
        return f"{significant(min(factors), 2)} to {significant(max(factors), 2)}"

    made = {"value:gain-workloads": str(len(gains))}
    for policy, short in (("least_load", "least"), ("round_robin", "round")):
        made[f"value:gain-{short}"] = span([gain.times(policy) for gain in gains])
        made[f"value:gain-{short}-ttft"] = span([gain.sooner(policy) for gain in gains])
    return made


def table(gains: Sequence[Gain]) -> Table:
    """Return the numbers of the picture."""

    def row(gain: Gain) -> tuple[str, ...]:
        carried = (significant(gain.carried_rps[policy], 3) for policy in POLICIES)
        ttft = (significant(gain.ttft_s[policy], 3) for policy in POLICIES)
        return (gain.title, f"{gain.limit_s:g} s", *carried, f"{gain.rate:g}", *ttft)

    carried, ttft = ([f"{NAMES[policy]}{unit}" for policy in POLICIES] for unit in (", requests/s", ", TTFT"))
    return Table(
        ("workload", "limit", *carried, "at", *ttft),
        [row(gain) for gain in gains],
        caption="Requests/s in steady state with the p99 of TTFT within the limit; then the mean TTFT in seconds at a "
        f"rate that all three carry. Means over {gains[0].seeds} seeds.",
    )


def drawings(gains: Sequence[Gain]) -> dict[str, Drawing]:
    """Return both halves of the picture, by the names of their files; each is narrow enough for a telephone."""
    carried = {gain.workload: gain.carried_rps for gain in gains}
    ttft_s = {gain.workload: gain.ttft_s for gain in gains}
    return {
        "gains-served.svg": _half(gains, carried, "/s", "Requests/s served within the limit", "serves"),
        "gains-ttft.svg": _half(gains, ttft_s, " s", "Mean time to first token", "takes"),
    }


def _half(gains: Sequence[Gain], found: Mapping[str, Mapping[str, float]], unit: str, title: str, what: str) -> Drawing:
    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        _bars(axes, gains, found, unit)
        axes.set(xlabel=f"times what round robin {what}")
        axes.set_yticks(range(len(gains)), [gain.title for gain in gains])
        axes.invert_yaxis()
        figure.suptitle(title, fontsize=11, fontweight="bold")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(POLICIES))

    return draw(fill, width_in=4.2, height_in=4.2)


def _bars(axes: Axes, gains: Sequence[Gain], found: Mapping[str, Mapping[str, float]], unit: str) -> None:
    """Draw a bar for each workload and policy: its multiple of round robin's, with its own value at the end."""
    thick = 0.8 / len(POLICIES)
    longest = 1.0
    for number, policy in enumerate(POLICIES):
        of_policy = [found[gain.workload] for gain in gains]
        widths = [one[policy] / one["round_robin"] for one in of_policy]
        places = [row + (number - 1) * thick for row in range(len(gains))]
        bars = axes.barh(places, widths, thick * 0.92, label=NAMES[policy], color=PALETTE[(0, 1, 7)[number]])
        labels = [f"{significant(one[policy], 2 if one[policy] < 100 else 3)}{unit}" for one in of_policy]
        axes.bar_label(bars, labels, padding=3, fontsize=8)
        longest = max(longest, *widths)
    axes.set_xlim(0, longest * 1.25)
    axes.grid(visible=False, axis="y")


def draw_pages() -> None:
    gains = known_gains()
    made = values(gains) | {"gains": markdown(table(gains))}
    fill(PAGES, made)
    for name, drawing in drawings(gains).items():
        (FIGURES / name).write_text(drawing.standalone(), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only fill in the pages and draw from the kept result")
    parser.add_argument("--seeds", type=int, default=len(grid.SEEDS), help="how many (default: %(default)s)")
    options = parser.parse_args()
    if not options.draw:
        KEPT.mkdir(parents=True, exist_ok=True)
        gains = [measure(name, grid.SEEDS[: options.seeds]) for name in WORKLOADS]
        RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(gains)) + b"\n")
        note("gains")
        print(f"kept: {RESULT}", file=sys.stderr)
    draw_pages()


if __name__ == "__main__":
    main()
