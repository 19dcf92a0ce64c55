"""Study the paper's five workloads as Preble makes them: its Table 1 and the figure beside it.

    python benchmarks/repro/study.py             # make and study them, write the results, draw
    python benchmarks/repro/study.py --draw      # draw from the results that are there

Results: benchmarks/results/study.json. Figures: docs/howto/study-a-trace/*.svg. Needs the extra `plot` to draw.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from preble.workloads import make_workload
from preble.workloads.study import StudyReport, draw_cdf, study
from preble.workloads.study.metrics import KEY_REQUESTS, PROMPT, RATIO, SHARED

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "study.json"
FIGURES = ROOT / "docs" / "howto" / "study-a-trace"
SOURCES = ("toolbench", "agent", "programming", "video", "longdoc")
REQUESTS, SEED = 5000, 0
DRAWN = {"prompt": PROMPT, "ratio": RATIO, "shared": SHARED, "key-requests": KEY_REQUESTS}
"""File name -> what it shows."""


def run() -> StudyReport:
    studies = []
    for source in SOURCES:
        print(f"studying {source}", file=sys.stderr, flush=True)
        studies.append(study(make_workload(source, REQUESTS, SEED)))
    return StudyReport(SOURCES, REQUESTS, SEED, None, tuple(studies))


def draw(report: StudyReport) -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name, metric in DRAWN.items():
        (FIGURES / f"{name}.svg").write_text(draw_cdf(metric, report.studies).standalone(), encoding="utf-8")


def main() -> None:
    if "--draw" not in sys.argv[1:]:
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(run()), indent=0) + b"\n")
    draw(msgspec.json.decode(RESULTS.read_bytes(), type=StudyReport))


if __name__ == "__main__":
    main()
