"""The HTML page for results, and the drawings in it."""

from __future__ import annotations

import re
import sys
from io import StringIO
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from preble.errors import ConfigError
from preble.lab.report import Drawing, Section, Table, Text, draw, html_page, terminal_tables
from support.pages import PageReader

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def line(figure: Figure) -> None:
    axes = figure.subplots()
    axes.plot([1, 2, 3], [1, 4, 9], marker="o", label="a <b> & c")
    axes.set(xlabel="seconds", ylabel="share")
    axes.legend()


@pytest.fixture
def drawing() -> Drawing:
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib (the extra `plot`)")
    return draw(line, "what it shows")


def test_a_page_has_every_part_in_its_order() -> None:
    table = Table(("", "mean"), [("prompt", "1,835")], "Lengths")
    reader = PageReader(
        html_page(
            "Title", [Section("First", [Text("words"), table]), Section("Second", [])], subtitle="s", made="today"
        )
    )
    assert reader.words == "Title Title s First words Lengths mean prompt 1,835 Second today"


def test_texts_are_escaped() -> None:
    hostile = "<script>alert('x')</script>"
    table = Table((hostile, hostile), [(hostile, hostile)], hostile)
    page = html_page(
        hostile, [Section(hostile, [Text(hostile), table, Drawing("<svg></svg>", hostile)])], subtitle=hostile
    )
    assert PageReader(page).words.count(hostile) == 11


def test_a_page_with_drawings_is_self_contained(drawing: Drawing) -> None:
    reader = PageReader(html_page("t", [Section("a", [drawing, drawing, Text("x"), drawing]), Section("b", [drawing])]))
    assert reader.ids and reader.references
    assert reader.words.count("what it shows") == 4 and "a <b> & c" in reader.words


def printed(table: Table, width: int) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(*terminal_tables(table, width), sep="\n")
    return console.file.getvalue()


def test_a_terminal_shows_the_same_cells_as_plain_text() -> None:
    table = Table(("", "mean [x]"), [("[red]a[/red]", "1"), ("b", "2")], "Caption [y]", marked=frozenset({1}))
    shown = printed(table, 60)
    assert all(text in shown for text in ("Caption [y]", "mean [x]", "[red]a[/red]", "│ b", "2 │"))


def test_a_table_too_wide_for_the_terminal_is_several_with_the_same_rows() -> None:
    cells = [f"{number:010}" for number in range(7)]
    table = Table(("", *(f"head{number}" for number in range(7))), [("name", *cells)], "Caption")
    assert len(terminal_tables(table, 99)) == 1
    assert len(terminal_tables(table, 98)) == 2
    shown = printed(table, 40)
    assert shown.count("name") == 4 and shown.count("Caption") == 1 and "…" not in shown
    assert [shown.count(text) for text in (*cells, *table.columns[1:])] == [1] * 14


def test_a_heading_longer_than_its_cells_is_wrapped_not_cut() -> None:
    shown = printed(Table(("", "requests sharing it", "averylongnamewithoutaspace"), [("a", "1", "2")]), 40)
    assert "requests" in shown and "sharing it" in shown
    assert "averylongnam" in shown and "…" not in shown


def test_drawings_that_follow_each_other_share_a_row(drawing: Drawing) -> None:
    page = html_page("t", [Section("a", [drawing, drawing, Text("x"), drawing])])
    assert page.count('<div class="figures">') == 2


def test_marked_rows_are_set_off() -> None:
    page = html_page("t", [Section("a", [Table(("a", "b"), [("1", "2"), ("3", "4")], marked=frozenset({1}))])])
    assert re.findall(r'<tr class="marked"><th scope="row">(.)', page) == ["3"]


def test_a_row_that_does_not_fit_its_heading_is_refused() -> None:
    with pytest.raises(ValueError, match="1 cells under 2 columns"):
        Table(("a", "b"), [("1",)])


def test_the_same_drawing_has_the_same_bytes(drawing: Drawing) -> None:
    assert draw(line, "what it shows") == drawing


def test_a_drawing_takes_the_colour_of_the_text_around(drawing: Drawing) -> None:
    colours = set(re.findall(r"#[0-9a-f]{6}\b", drawing.svg))
    assert colours == {"#3d7fd1"} and "currentColor" in drawing.svg
    assert 'width="' not in drawing.svg.split(">", 1)[0]


def test_a_drawing_alone_says_which_colours_it_has(drawing: Drawing) -> None:
    assert "prefers-color-scheme:dark" in drawing.standalone()
    assert drawing.standalone().startswith('<svg width="360pt" height="230.4pt"') and drawing.standalone().endswith(
        "</svg>\n"
    )


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        draw(line)
