"""Pages of the documentation whose tables are filled in from results: each stands between two markers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from preble.report import Table

MARKERS = re.compile(r"(<!-- (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
NOT_RUN = "*Not run yet.*\n"


def filled(page: str, made: Mapping[str, str]) -> str:
    """The page with its tables replaced by these; where there is none of that name, it says so."""
    return MARKERS.sub(lambda match: f"{match[1]}{made.get(match['name'], NOT_RUN)}{match[3]}", page)


def markdown(table: Table) -> str:
    """A table with its caption below; marked rows are in italics."""
    rows = [
        "| " + " | ".join(f"*{cell}*" if number in table.marked else str(cell) for cell in row) + " |"
        for number, row in enumerate(table.rows)
    ]
    head = "| " + " | ".join(table.columns) + " |\n|" + "---|" * len(table.columns)
    return "\n".join([head, *rows]) + f"\n\n{table.caption}\n"
