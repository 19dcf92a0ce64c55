"""A test that replaces a constant of the product does not run what is shipped, and says at that line what is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest

TESTS = Path(__file__).parents[1]
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+|\w+_s")
DIRECTIVE = re.compile(r"#\s*(type: ignore|noqa|pragma)\S*")
SHIPS = re.compile(r"# ships ([\d,.]+)(?: (s|KiB|MiB))?\b")
REPLACES = re.compile(r"setattr|patch|\w\._?[A-Z][A-Z0-9_]+ = ")
"""Stands in every file that replaces a constant: reading the others as trees takes seconds."""
UNITS = {None: 1, "s": 1, "KiB": 1024, "MiB": 1024 * 1024}


class Patch:
    """A constant that is replaced. `owner`: as the test calls it, such as `frames`, or its dotted name."""

    def __init__(self, line: int, owner: str, name: str) -> None:
        self.line, self.owner, self.name = line, owner, name


def patch_of(node: ast.AST) -> Patch | None:
    """Return what a statement or call replaces: by `setattr`, `patch`, `patch.object` or an assignment."""
    if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Attribute):
        owner, name = ast.unparse(target.value), target.attr
        found = Patch(node.lineno, owner, name) if name.strip("_").isupper() and not owner.startswith("self") else None
    elif isinstance(node, ast.Call) and re.search(r"(^|\.)(setattr|patch|patch\.object)$", ast.unparse(node.func)):
        match node.args:
            case [ast.Constant(value=str(dotted)), *_]:
                owner, _, name = dotted.rpartition(".")
            case [target, ast.Constant(value=str(name)), *_]:
                owner = ast.unparse(target)
            case _:
                return None
        found = Patch(node.lineno, owner, name)
    else:
        return None
    return found if found is not None and CONSTANT.fullmatch(found.name) else None


def shipped(patch: Patch, tree: ast.Module) -> object:
    """Return the value that the product has, None where the owner is no import of it."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
    dotted = names.get(patch.owner, patch.owner)
    if not dotted.startswith("preble."):
        return None
    try:
        owner = import_module(dotted)
    except ModuleNotFoundError:
        owner = resolve_name(dotted)
    return getattr(owner, patch.name)


def complaints(text: str) -> Iterator[str]:
    """Yield what is wrong with each replacement: no comment there, or one that names another value than ships."""
    if not REPLACES.search(text):
        return
    lines, tree = ["", *text.splitlines()], ast.parse(text)
    for patch in filter(None, map(patch_of, ast.walk(tree))):
        above, there = lines[patch.line - 1].strip(), lines[patch.line]
        comment = DIRECTIVE.sub("", (above if above.startswith("#") else "") + "".join(re.findall(r"#.*", there)))
        if not re.search(r"\w", comment):
            yield f"{patch.line} {patch.name}: say in a comment there what ships"
        elif said := SHIPS.search(comment):
            value = float(said[1].replace(",", "").rstrip(".")) * UNITS[said[2]]
            if (real := shipped(patch, tree)) not in (None, value):
                yield f"{patch.line} {patch.name}: ships {real}, and not {said[1]}"


def test_what_replaces_a_constant_says_what_ships() -> None:
    found = {str(path.relative_to(TESTS)): [*complaints(path.read_text("utf-8"))] for path in TESTS.rglob("*.py")}
    found.pop("docs/test_patched_defaults.py")
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    "line",
    [
        'monkeypatch.setattr(frames, "MOST_BYTES", 1)',
        'monkeypatch.setattr(frames, "MOST_BYTES", 1)  # type: ignore[misc]',
        'monkeypatch.setattr(frames, "MOST_BYTES", 1)  # ships 16 MiB',
        'monkeypatch.setattr("preble.serving.link.frames.MOST_BYTES", 1)',
        'mock.patch.object(frames, "MOST_BYTES", 1)',
        "frames.MOST_BYTES = 1",
    ],
)
def test_a_replacement_without_what_ships_is_found(line: str) -> None:
    inside = f'from preble.serving.link import frames\n\ndef test() -> None:\n    """A docstring."""\n    {line}\n'
    assert [*complaints(inside)] != []
    assert [*complaints(inside.replace(line, f"{line.partition('  #')[0]}  # ships 256 MiB"))] == []
