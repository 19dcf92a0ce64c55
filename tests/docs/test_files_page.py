"""The page of all files, and what the page of rooms says of each room, are the files' own first lines."""

from __future__ import annotations

from support.scripts import script


def test_every_file_stands_on_the_page_with_its_own_first_line() -> None:
    files = script("dev/files_page.py")
    assert files.PAGE.read_text(encoding="utf-8") == files.files_page(), "run `make reference`"
    page = files.ROOMS_PAGE.read_text(encoding="utf-8")
    assert files.with_names(files.with_rooms(page)) == page, "run `make reference`"
    assert len(files.ROOM.findall(page)) > 20


def test_every_file_says_in_its_first_line_what_it_is() -> None:
    files = script("dev/files_page.py")
    assert [str(path) for path in files.SRC.rglob("*.py") if not files.first_line(path)] == []
