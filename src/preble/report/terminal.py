"""The tables of a page, in a terminal."""

from __future__ import annotations

from rich.table import Table as RichTable
from rich.text import Text as RichText

from preble.report.page import Table


def terminal_table(table: Table) -> RichTable:
    """The same cells for `rich` to print, the caption as its title; cells are plain text, never markup."""
    shown = RichTable(title=RichText(table.caption) if table.caption else None, title_justify="left")
    for number, column in enumerate(table.columns):
        shown.add_column(RichText(column), justify="right" if number else "left")
    for number, row in enumerate(table.rows):
        shown.add_row(*map(RichText, row), style="red" if number in table.marked else None)
    return shown
