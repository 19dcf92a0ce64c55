"""The tables of a page, in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText

from preble.lab.report.page import Table

HEAD_WIDTH = 12
"""A longer heading wraps unless its cells are as wide."""

BORDER = 3
"""Terminal cells that a column takes besides its text."""


def print_tables(console: Console, *tables: Table) -> None:
    """Print tables, each as wide as the console at most."""
    for table in tables:
        console.print(*terminal_tables(table, console.width), sep="\n")


def terminal_tables(table: Table, width: int) -> list[RichTable]:
    """Return the table for `rich` to print, split into tables of at most `width` cells.

    Each repeats the column that names the rows; the first has the caption as its title. Cells are plain text, never
    markup. A single column may be wider than `width`.
    """
    shown = [_rich_table(table, numbers) for numbers in _that_fit(table, width)]
    if table.caption:
        shown[0].title, shown[0].title_justify = RichText(table.caption), "left"
    return shown


def _that_fit(table: Table, width: int) -> Iterator[Sequence[int]]:
    """Return the columns after the first, in groups that fit beside it."""
    room = width - 1 - _width(table, 0)
    run: list[int] = []
    used = 0
    for number in range(1, len(table.columns)):
        used += _width(table, number)
        if run and used > room:
            yield run
            run, used = [], _width(table, number)
        run.append(number)
    yield run


def _width(table: Table, column: int) -> int:
    cells = max((cell_len(row[column]) for row in table.rows), default=0)
    return max(cells, min(cell_len(table.columns[column]), HEAD_WIDTH)) + BORDER


def _rich_table(table: Table, columns: Sequence[int]) -> RichTable:
    shown = RichTable()
    shown.add_column(RichText(table.columns[0]))
    for number in columns:
        shown.add_column(RichText(table.columns[number], overflow="fold"), justify="right")
    for place, row in enumerate(table.rows):
        cells = (RichText(row[number]) for number in (0, *columns))
        shown.add_row(*cells, style="red" if place in table.marked else None)
    return shown
