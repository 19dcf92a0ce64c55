"""One self-contained HTML page: no script, no remote font or image; it suits phones and dark mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from preble.lab.report.drawing import Drawing


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph of plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """Cells of plain text. The first column names the row; the others are numbers, aligned to the right.

    `marked`: indexes of the rows to set off from the others.

    Raises: ValueError: a row is not as long as the heading.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    marked: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(row)} cells under {len(self.columns)} columns: {list(row)}")


Part = Text | Table | Drawing


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what follows it, in order. Consecutive drawings stand side by side where there is room."""

    title: str
    parts: Sequence[Part]


def html_page(title: str, sections: Iterable[Section], *, subtitle: str = "", made: str = "") -> str:
    """Return the page. Every text is escaped; the same arguments give the same page.

    `made`: when and by which command, at its foot.
    """
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(files("preble.lab.report").joinpath("page.html.j2").read_text(encoding="utf-8"))
    numbered = enumerate(sections)
    content = [(section.title, list(_blocks(section.parts, f"s{number}"))) for number, section in numbered]
    return template.render(title=title, subtitle=subtitle, sections=content, made=made)


def _blocks(parts: Sequence[Part], prefix: str) -> Iterator[tuple[str, object]]:
    """Return (kind, content) for the template; consecutive drawings are one block."""
    row: list[tuple[str, str]] = []
    for number, part in enumerate(parts):
        if isinstance(part, Drawing):
            row.append((part.inline(f"{prefix}-{number}-"), part.caption))
            continue
        if row:
            yield "figures", row
            row = []
        yield ("text", part.text) if isinstance(part, Text) else ("table", part)
    if row:
        yield "figures", row
