"""What scripts write into the pages of the documentation: tables and values, each between two markers.

A table stands between `<!-- name -->` on a line of its own and `<!-- end -->`. A value stands inside a sentence:
`<!-- value:name -->12 %<!-- end -->`. The sentence around it is free: tests compare tables and values only.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from preble.lab.report import Table

MARKERS = re.compile(r"(<!-- (?P<name>(?:value:)?[\w.-]+) -->\n?).*?(<!-- end -->)", flags=re.DOTALL)
ROOT = Path(__file__).parents[2]
EVALUATION = (ROOT / "docs" / "evaluation.md", ROOT / "benchmarks" / "EVALUATION.md")
"""What users decide by, and every table."""
EVALUATION_FIGURES = ROOT / "benchmarks" / "evaluation"
NOT_RUN = "*Not run yet.*\n"
"""Stands for a table without results."""


def filled(page: str, made: Mapping[str, str]) -> str:
    """Return the page with these tables and values between their markers. Other markers keep what they have.

    >>> filled("It takes <!-- value:time -->1 s<!-- end -->.", {"value:time": "2 s"})
    'It takes <!-- value:time -->2 s<!-- end -->.'
    """
    return MARKERS.sub(
        lambda match: match[1] + made[match["name"]] + match[3] if match["name"] in made else match[0], page
    )


def fill(pages: Iterable[Path], made: Mapping[str, str]) -> None:
    """Fill in these tables and values wherever the pages have their markers."""
    for page in pages:
        page.write_text(filled(page.read_text(encoding="utf-8"), made), encoding="utf-8")


def names(page: str) -> list[str]:
    """Return the names of the page's markers, in order."""
    return [match["name"] for match in MARKERS.finditer(page)]


def is_only_drawn(text: str | None) -> bool:
    """Return whether the command that `text` explains shall run nothing. `--help` shows the text and ends it."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="run nothing: draw and fill in from the kept result")
    return bool(parser.parse_args().draw)


def fenced(text: str) -> str:
    """Return the text as a block of code."""
    return f"```\n{text}\n```\n"


def markdown(table: Table) -> str:
    """Return a table with its caption below; marked rows are in italics."""
    rows = [
        "| " + " | ".join(f"*{cell}*" if cell and number in table.marked else str(cell) for cell in row) + " |"
        for number, row in enumerate(table.rows)
    ]
    head = "| " + " | ".join(table.columns) + " |\n|" + "---|" * len(table.columns)
    return "\n".join([head, *rows]) + f"\n\n{table.caption}\n"
