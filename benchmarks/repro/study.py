"""Study the paper's five workloads as Preble makes them: its Table 1 and the figure beside it.

    python benchmarks/repro/study.py             # make and study them, write the results, show them
    python benchmarks/repro/study.py --draw      # show the results that are there

Results: benchmarks/results/study.json. Shown in docs/howto/study-a-trace.md (its table is written anew) and in the
figures beside it. Needs the extra `plot`.
"""

from __future__ import annotations

import re
import sys
from io import StringIO
from pathlib import Path

import msgspec
from page import is_only_drawn
from rich.console import Console

from preble.lab.report import terminal_tables
from preble.lab.workloads import make_workload
from preble.lab.workloads.study import StudyReport, draw_cdf, study, summary_tables
from preble.lab.workloads.study.metrics import KEY_REQUESTS, PROMPT, RATIO, SHARED

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "study.json"
FIGURES = ROOT / "docs" / "howto" / "study-a-trace"
PAGE = FIGURES.with_suffix(".md")
WIDTH = 80
"""Of the terminal on the page."""

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


def shown(report: StudyReport) -> str:
    """What a terminal shows first."""
    console = Console(file=StringIO(), width=WIDTH)
    console.print(*terminal_tables(summary_tables(report.studies)[0], WIDTH), sep="\n")
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()).strip()


def write_page(report: StudyReport) -> None:
    """Put the table behind its command on the page."""
    page = PAGE.read_text(encoding="utf-8")
    below_command = re.compile(r"(?<=\n)(\$ preble workload study [^\n]*\n).*?(?=\n```)", flags=re.DOTALL)
    PAGE.write_text(below_command.sub(lambda match: match[1] + shown(report), page, count=1), encoding="utf-8")


def main() -> None:
    if not is_only_drawn(__doc__):
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(run()), indent=0) + b"\n")
    report = msgspec.json.decode(RESULTS.read_bytes(), type=StudyReport)
    draw(report)
    write_page(report)


if __name__ == "__main__":
    main()
