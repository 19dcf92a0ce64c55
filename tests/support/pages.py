"""Reading a page that we made."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "br"}
FOREIGN = {"script", "img", "link", "iframe", "object"}


class PageReader(HTMLParser):
    """Holds a page to what is true of every page of ours: tags closed in order, ids unique, references inside it only,
    no script, nothing fetched. `words`: its text, runs of white space as one space."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self._open: list[str] = []
        self._text: list[str] = []
        self.ids: list[str] = []
        self.references: set[str] = set()
        self.feed(page)
        self.close()
        assert self._open == []
        assert len(self.ids) == len(set(self.ids))
        assert self.references <= {f"#{name}" for name in self.ids}

    @property
    def words(self) -> str:
        return " ".join(" ".join(self._text).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in FOREIGN
        if tag not in VOID:
            self._open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in {"href", "xlink:href", "src"}:
                self.references.add(value or "")
            else:
                self.references |= set(re.findall(r"url\(([^)]*)\)", value or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self._text.append(data)
