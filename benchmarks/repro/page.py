"""Pages of the documentation whose tables are filled in from results: each stands between two markers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from preble.report import Table

MARKERS = re.compile(r"(<!-- (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
NOT_RUN = "*Not run yet.*\n"
"""In place of a table whose results are not there."""


def filled(page: str, made: Mapping[str, str]) -> str:
    """The page with these tables in place of those of their names; what other scripts fill in stays as it is."""
    return MARKERS.sub(
        lambda match: match[1] + made[match["name"]] + match[3] if match["name"] in made else match[0], page
    )


def markdown(table: Table) -> str:
    """A table with its caption below; marked rows are in italics."""
    rows = [
        "| " + " | ".join(f"*{cell}*" if cell and number in table.marked else str(cell) for cell in row) + " |"
        for number, row in enumerate(table.rows)
    ]
    head = "| " + " | ".join(table.columns) + " |\n|" + "---|" * len(table.columns)
    return "\n".join([head, *rows]) + f"\n\n{table.caption}\n"
