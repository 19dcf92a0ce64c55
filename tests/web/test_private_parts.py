"""`preble.web` builds on parts of uvicorn that it does not promise: they are there, and the version is pinned."""

from __future__ import annotations

import ast
import inspect
import textwrap
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from preble.web.server.connection import BoundedConnection
from preble.web.server.server import Server

ROOT = Path(__file__).resolve().parents[2]


def used_by(own: type) -> set[str]:
    """Names after `self.` and `super().` in a class of ours."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(own)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()")
    }


def set_by(theirs: type) -> set[str]:
    """Names that a class has, or that its methods set on `self`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(theirs)))
    targets = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    return targets | set(dir(theirs))


@pytest.mark.parametrize(("own", "theirs"), [(BoundedConnection, HttpToolsProtocol), (Server, uvicorn.Server)])
def test_what_we_use_of_uvicorn_is_there(own: Any, theirs: Any) -> None:
    ours = set(vars(own)) | (set_by(own) - set_by(theirs))
    inherited = used_by(own) - ours
    assert inherited, "something is inherited, or this test looks at the wrong class"
    assert inherited <= set_by(theirs), inherited - set_by(theirs)


def test_uvicorn_is_pinned_to_the_minor_that_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [pin] = [requirement for requirement in project["dependencies"] if requirement.startswith("uvicorn")]
    major, minor, *_ = map(int, version("uvicorn").split("."))
    assert pin == f"uvicorn>={major}.{minor},<{major}.{minor + 1}"
