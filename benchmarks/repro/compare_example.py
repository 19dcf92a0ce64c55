"""The example of docs/howto/compare-policies.md: the default policy and its peers on two replicas, under tool use.

    python benchmarks/repro/compare_example.py             # simulate (about 2 minutes on two cores), draw
    python benchmarks/repro/compare_example.py --draw      # draw from the results that are there

It is what this command does, but for where the files go; whichever is interrupted goes on where it was:

    preble compare --workload toolbench --replicas 2 --kv-tokens 60000 --policy preble,least_load,round_robin \
        --rps 16,20,24 --slo-ttft 1 --seed 0,1,2 --load 0.5,0.8,0.95 --json FILE

Results: benchmarks/results/compare_example.json. Figures: docs/howto/compare-policies/. Needs the extra `plot` to draw.
"""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from made_by import begin, note
from page import is_only_drawn
from rich.console import Console

from preble.lab.compare import ComparePlan, CompareResult, compare_policies, read_result
from preble.lab.compare.figures import capacity_drawing, curve_drawing
from preble.lab.compare.numbers import TTFT_P99
from preble.lab.compare.tables import terminal_table
from preble.lab.metrics.capacity import CapacitySlo
from preble.lab.report import terminal_tables
from preble.lab.report.progress import progress
from preble.lab.sim import SimConfig
from preble.lab.workloads import WorkloadPlan
from preble.profiles import load_profile

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "compare_example.json"
FIGURES = ROOT / "docs" / "howto" / "compare-policies"
WORKLOAD = "toolbench"
WIDTH = 110
"""Of the terminal on the page."""


def example() -> ComparePlan:
    return ComparePlan(
        workloads={WORKLOAD: WorkloadPlan(source=WORKLOAD, requests=2000)},
        policies=("preble", "least_load", "round_robin"),
        cluster=SimConfig(profile=load_profile("a6000-mistral-7b"), replicas=2, kv_tokens=60_000),
        rates=(16.0, 20.0, 24.0),
        slo=CapacitySlo(ttft_p99_s=1.0),
        lasting_s=540.0,
    )


def shown(result: CompareResult) -> str:
    """What a terminal shows, but for the meaning of the columns."""
    console = Console(file=StringIO(), width=WIDTH)
    console.print(*terminal_tables(terminal_table(result, WORKLOAD), WIDTH), sep="\n")
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()).strip()


def draw(result: CompareResult) -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name, drawing in (
        ("capacity", capacity_drawing(result, WORKLOAD)),
        ("ttft-p99", curve_drawing(result, WORKLOAD, TTFT_P99)),
    ):
        (FIGURES / f"{name}.svg").write_text(drawing.standalone(), encoding="utf-8")


def main() -> None:
    if not is_only_drawn(__doc__):
        begin("compare_example", RESULTS)
        with progress("compare", "runs") as on_progress:
            compare_policies(example(), path=RESULTS, on_progress=on_progress)
        note("compare_example")
    result = read_result(RESULTS)
    print(shown(result))
    draw(result)


if __name__ == "__main__":
    main()
