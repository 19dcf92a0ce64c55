"""Write what the documentation says of each file and room, from the first lines of the files: `make reference`.

.venv/bin/python dev/files_page.py    # docs/reference/files.md, and the tables of docs/concepts/architecture.md
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "preble"
PAGE = ROOT / "docs" / "reference" / "files.md"
ROOMS_PAGE = ROOT / "docs" / "concepts" / "architecture.md"
ROOM = re.compile(r"^(\| \d+ \| `(?P<room>[\w/]+)` \| )(?!(?:global|local|both) \|).*\|$", re.MULTILINE)
"""A row of the tables of rooms: floor, room, what is in it."""
NAMES_HEAD = "| folder | files |\n| --- | --- |"
NAMES = re.compile(re.escape(NAMES_HEAD) + r"\n(?:\|.*\|\n)*")

OF_A_REQUEST = """
    web/server/connection.py
    gateway/app.py
    prompts/endpoints/table.py
    gateway/http/access.py
    gateway/http/bodies.py
    gateway/requests/json_requests.py
    serving/serving.py
    serving/intake.py
    prompts/endpoints/bodies.py
    prompts/tokens/pool.py
    prompts/tokens/tokenizer.py
    serving/turns.py
    core/admission/admission.py
    gateway/requests/relay.py
    serving/placements.py
    core/placing/scheduler.py
    core/policies/preble.py
    core/policies/view.py
    core/prefixes/index.py
    core/costs/model.py
    core/placing/in_flight.py
    core/placing/cache_tracker.py
    core/cluster/state.py
    serving/placed.py
    gateway/requests/attempt.py
    engines/openai.py
    engines/http.py
    web/client/pool.py
    prompts/endpoints/answers.py
    web/server/answering.py
    rules/ejection.py
    serving/telemetry/metrics.py
    decisions/recent.py
""".split()  # noqa: SIM905 (one a line)
"""The files that matter most to a completion, in the order in which it enters them; `dev/walk.py --files` shows all."""

HEAD = """\
# Every file, in one line

<!-- Made by `make reference` from the first lines of the files; a test compares. -->

[Where things are](../concepts/architecture.md) says which room may import which. Paths are below `src/preble`.

## In the order of a request

The files that matter most to a completion, as it enters them.

| file | what it is |
| --- | --- |
"""


def first_line(path: Path) -> str:
    """Return the first paragraph of a file's docstring, up to its first sentence's end. "" for a file without one."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[^.].)\. (?=[A-Z])", paragraph)[0].removesuffix(".").replace("|", "\\|")


def said_of(room: str) -> str:
    """Return what a room says of itself: a folder, or a file at the top."""
    folder = SRC / room / "__init__.py"
    return first_line(folder if folder.exists() else SRC / f"{room}.py")


def files_page() -> str:
    """Return the page of all files in Markdown."""
    parts = [HEAD + "".join(_row(SRC / name, name) for name in OF_A_REQUEST)]
    folders = [SRC, *sorted(path.parent for path in SRC.rglob("__init__.py") if path.parent != SRC)]
    for folder in folders:
        files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
        title, said = folder.relative_to(SRC).as_posix(), first_line(folder / "__init__.py")
        head = f"## {'At the top' if folder == SRC else f'`{title}`'}\n\n{said}.\n"
        table = "\n| file | what it is |\n| --- | --- |\n" + "".join(_row(path, path.name) for path in files)
        parts.append(head + (table if files else ""))
    return "\n".join(parts)


def with_rooms(page: str) -> str:
    """Return the page of rooms with what each says of itself in its tables."""
    return ROOM.sub(lambda row: f"{row[1]}{said_of(row['room'])} |", page)


def with_names(page: str) -> str:
    """Return the page of rooms with the names of all files, folder by folder, in its last table."""
    folders = sorted(path.parent for path in SRC.rglob("__init__.py") if path.parent != SRC)
    named = {folder: [f.stem for f in sorted(folder.glob("*.py")) if f.stem != "__init__"] for folder in folders}
    rows = (
        f"| `{folder.relative_to(SRC).as_posix()}` | {', '.join(names)} |" for folder, names in named.items() if names
    )
    return NAMES.sub("\n".join((NAMES_HEAD, *rows, "")), page)


def _row(path: Path, name: str) -> str:
    return f"| `{name}` | {first_line(path)} |\n"


if __name__ == "__main__":
    PAGE.write_text(files_page(), encoding="utf-8")
    page = ROOMS_PAGE.read_text(encoding="utf-8")
    ROOMS_PAGE.write_text(with_names(with_rooms(page)), encoding="utf-8")
