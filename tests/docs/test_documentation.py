"""What the documentation promises of the repository, compared with it."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from preble.cli import COMMANDS
from support.scripts import script

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MARKDOWN = [*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements}  # type: ignore[index]


RAYS = re.compile(r"ray|(preble\.integrations\.ray\.)\w+")


def documented() -> dict[str, str]:
    """Package -> why, from the table rows of the dependency page."""
    page = (ROOT / "docs" / "reference" / "dependencies.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `([\w.-]+)` \| (.+) \|$", page, flags=re.MULTILINE))


def test_every_dependency_has_its_reason() -> None:
    required = names(PROJECT["dependencies"])
    for extra in PROJECT["optional-dependencies"].values():
        required |= names(extra)
    assert documented().keys() == required
    assert all(len(why) > 10 for why in documented().values())


def test_every_dependency_is_pinned_for_ci() -> None:
    lines = (ROOT / "requirements" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines if "==" in line}
    setup = (ROOT / "dev" / "setup.py").read_text(encoding="utf-8")
    assert '"ray[serve]==' in setup, "Ray has an environment of its own"
    assert documented().keys() - {"ray"} <= pinned


def test_the_command_reference_is_what_help_says() -> None:
    """Run `make reference` and commit the result."""
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert page == script("dev/commands_page.py").command_reference()


def test_make_help_lists_every_verb_and_no_other() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = set(re.search(r"^\.PHONY: (.+)$", makefile, flags=re.MULTILINE)[1].split())  # type: ignore[index]
    explained = set(re.findall(r"^([a-z-]+):.*## ", makefile, flags=re.MULTILINE))
    assert explained == phony


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_make_verb_that_a_page_names_exists(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    verbs = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    used = set(re.findall(r"(?:`|^\s*|\$ )make ([a-z][a-z-]*)", page.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert used <= verbs


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_that_a_page_names_exists(page: Path) -> None:
    used = set(re.findall(r"(?:`|^\$ )preble ([a-z]+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert used <= COMMANDS.keys()


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    product = ROOT / "src" / "preble"
    named = re.findall(r"`(?:src/)?(?:preble/)?(\w+/[\w/]+\.py)`", page.read_text(encoding="utf-8"))
    rooms = {path.name for path in product.iterdir()}
    assert [name for name in named if name.split("/")[0] in rooms and not (product / name).exists()] == []


def python_examples() -> list[Any]:
    pages = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in MARKDOWN}
    blocks = ((name, re.findall(r"^```python$\n(.*?)^```$", text, flags=re.M | re.S)) for name, text in pages.items())
    return [pytest.param(code, id=f"{name}-{number}") for name, found in blocks for number, code in enumerate(found)]


@pytest.mark.parametrize("code", python_examples())
def test_every_python_example_is_python_and_imports_what_there_is(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and (found := RAYS.fullmatch(node.module or "")):
            # Ray is in an environment of its own
            source = (ROOT / "src" / f"{found[0].replace('.', '/')}.py").read_text(encoding="utf-8") if found[1] else ""
            assert [alias.name for alias in node.names if found[1] and f" {alias.name}" not in source] == []
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
