"""The evaluation in docs/bursts.md: the paper's figures, every other router's rule, and the cases that do harm.

    python benchmarks/repro/evaluation.py                      # what is not there yet (hours; see --list)
    python benchmarks/repro/evaluation.py toolbench video      # these cases
    python benchmarks/repro/evaluation.py bounds loss          # the bounds; latencies around a loss
    python benchmarks/repro/evaluation.py --list
    python benchmarks/repro/evaluation.py --draw               # fill in the pages from the results that are there

A case is a comparison as `preble compare` makes it; each has a file in benchmarks/results/evaluation/, and what is
interrupted goes on where it was. Cases of real traces need them in the folder named by PREBLE_DATA. To draw, the extra
`plot` is needed. The details in docs/evaluation-details/ are written as a whole, of docs/bursts.md the tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from evaluation_cases import CASES, DATA, Case
from evaluation_extras import RESULTS, bounds, known_bounds, known_losses, losses
from evaluation_tables import (
    Results,
    detail_table,
    distance_table,
    harm_table,
    loss_table,
    of_group,
    overview_table,
    paper_table,
)
from page import NOT_RUN, filled, markdown

from preble.lab.compare import CompareResult, compare_policies, read_result
from preble.lab.compare.figures import curve_drawing
from preble.lab.compare.numbers import E2E_MEAN, TTFT_P99, Number, caution
from preble.lab.compare.result import write_result
from preble.lab.report.progress import progress

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "bursts.md"
DETAILS = DOCS / "evaluation-details"
FIGURES = DOCS / "evaluation"
DRAWN = (TTFT_P99, E2E_MEAN)
EXTRAS = ("bounds", "loss")
SIZES = ("fleets", "caches", "traffic")
"""The groups of cases of other sizes."""


class Details(NamedTuple):
    """One page of details: its heading, what stands below it, and the groups of its cases."""

    title: str
    text: str
    groups: tuple[str, ...]


PAGES: Mapping[str, Details] = MappingProxyType(
    {
        "workloads": Details(
            "Details: the workloads", "Every policy on the paper's workloads and on conversations.", ("four",)
        ),
        "harm": Details("Details: harm", "Every policy where one for sharing may do badly.", ("harm", "loss")),
        "clusters": Details(
            "Details: the paper's clusters, arrivals, parts of E2",
            "Two A6000, two pairs of H100 with Llama-3-70B, Azure's arrivals, and E2 without this or that.",
            ("2", "70b", "azure", "ablation"),
        ),
        "sizes": Details(
            "Details: other sizes",
            "More and fewer replicas, other GPUs, other caches, recorded traces and mixes.",
            SIZES,
        ),
    }
)


def result_path(case: Case) -> Path:
    return RESULTS / f"{case.name}.json"


def figure_name(case: Case, number: Number) -> str:
    return f"{case.name}-{number.name.replace(' ', '-').lower()}.svg"


def tables(results: Results) -> dict[str, str]:
    """What stands between the markers of docs/bursts.md, by name."""
    made = {
        **{name: overview_table(results, group) if of_group(results, group) else None for name, group in OVERVIEWS},
        "distance": distance_table(results, found) if (found := known_bounds(results)) else None,
        "paper": paper_table(results) if any(CASES[name].paper for name in results) else None,
        "harm": harm_table(results) if of_group(results, "harm") else None,
        "loss": loss_table(lost) if (lost := known_losses()) else None,
    }
    made |= {name: detail_table(results[name], CASES[name]) if name in results else None for name in IN_PAGE}
    return {name: NOT_RUN if table is None else markdown(table) for name, table in made.items()} | values(results)


def values(results: Results) -> dict[str, str]:
    """What sentences of docs/bursts.md quote, by marker; nothing until all cases that they quote have run."""
    of_groups = (("four",), ("harm",), SIZES)
    four, harm, sizes = ([case.name for case in CASES.values() if case.group in groups] for groups in of_groups)
    if not results.keys() >= {*four, *harm, *sizes}:
        return {}
    standing = {(case, one.policy): one for case in results for one in results[case].standings_of(case)}

    def shares(policy: str, cases: list[str]) -> list[float]:
        return [standing[case, policy].share_of_best for case in cases]

    def worst_of(policy: str, cases: list[str]) -> str:
        return min(cases, key=lambda case: standing[case, policy].share_of_best)

    def carried(policy: str) -> str:
        estimate = standing["video", policy].capacity_rps
        return f"{estimate.mean:.1f} ± {estimate.half_width:.1f}"

    worst_size = worst_of("preble", sizes)
    others = {policy for case, policy in standing if case in sizes} - {"preble"}
    made = {
        "preble-worst": CASES[worst_of("preble", four)].title,
        "preble-harm": f"{min(shares('preble', harm)):.0%}",
        "preble-worst-size": CASES[worst_size].title,
        "first-at-worst-size": f"`{results[worst_size].standings_of(worst_size)[0].policy}`",
        "others-sizes": f"{max(min(shares(policy, sizes)) for policy in others):.0%}",
        "preble-video": f"{standing['video', 'preble'].share_of_best:.0%}",
        "preble-video-rps": carried("preble"),
        "slim-video-rps": carried("slim_router"),
        "e2-multiturn": f"{standing['multiturn', 'e2'].share_of_best:.0%}",
        "e2-agent": f"{standing['agent', 'e2'].share_of_best:.0%}",
        "least-load": _range(shares("least_load", four)),
        "round-robin": _range(shares("round_robin", four)),
        "preble-sizes": f"{min(shares('preble', sizes)):.0%}",
        "sizes": str(len(sizes)),
        "sglang-32": f"{standing['size-32', 'sglang_cache_aware'].share_of_best:.0%}",
    }
    return {f"value:{name}": value for name, value in made.items()}


def _range(shares: list[float]) -> str:
    return f"{min(shares):.0%} to {max(shares):.0%}"


OVERVIEWS = (
    ("overview", "four"),
    ("harm-overview", "harm"),
    ("fleets", "fleets"),
    ("caches", "caches"),
    ("traffic", "traffic"),
)
"""Every policy's share of the best one's capacity: the name of the table, and the group of its cases."""

IN_PAGE = ("azure", "ablation")
"""Cases of which docs/bursts.md itself shows the details."""


def details(results: Results) -> dict[str, str]:
    """The pages of the details, by name."""
    return {
        name: "\n".join(
            [
                f"# {page.title}",
                "",
                f"{page.text} What the columns mean and what is to be seen: [bursts from cold](../bursts.md).",
                *(line for case in of_group(results, *page.groups) for line in _section(results[case.name], case)),
            ]
        )
        + "\n"
        for name, page in PAGES.items()
    }


def _section(result: CompareResult, case: Case) -> Iterator[str]:
    yield from ("", f"## {case.full_title[0].upper()}{case.full_title[1:]}", "")
    plan = result.plan
    rates = ", ".join(f"{rate:g}" for rate in result.runs_of(case.workload, plan.policies[0]))
    seeds = f"seeds {plan.seeds[0]} to {plan.seeds[-1]}" if len(plan.seeds) > 1 else f"seed {plan.seeds[0]}"
    yield f"`{case.name}`: {plan.workloads[case.workload].requests:,} requests, {seeds}, run at {rates} requests/s."
    yield ""
    for number in DRAWN:
        yield f"![{number.name} against the rate, {case.title}](../evaluation/{figure_name(case, number)})"
    yield from ("", markdown(detail_table(result, case)).rstrip())
    if case.group != "loss" and (warning := caution(result, case.workload)):
        yield from ("", warning)


def draw(results: Results) -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        case = CASES[name]
        for number in DRAWN:
            drawing = curve_drawing(result, case.workload, number)
            (FIGURES / figure_name(case, number)).write_text(drawing.standalone(), encoding="utf-8")


def write_pages(results: Results) -> None:
    DETAILS.mkdir(parents=True, exist_ok=True)
    for name, text in details(results).items():
        (DETAILS / f"{name}.md").write_text(text, encoding="utf-8")
    if PAGE.exists():
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables(results)), encoding="utf-8")


def known_results() -> dict[str, CompareResult]:
    """The results that are complete."""
    found = {case.name: read_result(result_path(case)) for case in CASES.values() if result_path(case).exists()}
    return {name: result for name, result in found.items() if result.is_complete}


def run(case: Case) -> None:
    """Runs of plans that the case had before are not kept."""
    print(f"{case.name}: {case.full_title}", file=sys.stderr)
    with progress("compare", "runs") as on_progress:
        result = compare_policies(case.plan(DATA), path=result_path(case), on_progress=on_progress)
    write_result(msgspec.structs.replace(result, other_runs=[]), result_path(case))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CASE")
    parser.add_argument("--list", action="store_true", help="list the names of the cases")
    parser.add_argument("--draw", action="store_true", help="only fill in the pages and draw from the kept results")
    options = parser.parse_args()
    if unknown := set(options.names) - set(CASES) - set(EXTRAS):
        parser.error(f"there is no case {', '.join(sorted(unknown))}; --list shows them")
    if options.list:
        print(*(f"{case.name:24}{case.full_title}" for case in CASES.values()), *EXTRAS, sep="\n")
        return
    if options.draw:
        results = known_results()
        draw(results)
        write_pages(results)
        return
    names = options.names or [*CASES, *EXTRAS]
    for case in [CASES[name] for name in names if name in CASES]:
        run(case)
    if "bounds" in names:
        bounds(known_results())
    if "loss" in names:
        losses()


if __name__ == "__main__":
    main()
