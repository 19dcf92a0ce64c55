"""The tables of a page, in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.table import Table as RichTable
from rich.text import Text as RichText

from preble.report.page import Table

HEAD_WIDTH = 12
"""A longer heading is wrapped where the cells below it are not wider."""

BORDER = 3
"""Cells of terminal that a column takes beside its text."""


def terminal_tables(table: Table, width: int) -> list[RichTable]:
    """The same cells for `rich` to print: in as many tables as it takes to keep each within `width`.

    The column that names the rows is repeated in each, and the caption is the title of the first. Cells are plain
    text, never markup. A column by itself may be wider than `width` allows.
    """
    shown = [_rich_table(table, numbers) for numbers in _that_fit(table, width)]
    if table.caption:
        shown[0].title, shown[0].title_justify = RichText(table.caption), "left"
    return shown


def _that_fit(table: Table, width: int) -> Iterator[Sequence[int]]:
    """The columns behind the first, in runs that fit beside it."""
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
