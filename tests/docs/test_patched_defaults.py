"""A test that replaces a constant of the product does not run what is shipped, and says why."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+|\w+_s")


def patches_without_reason(path: Path) -> Iterator[str]:
    """Where a constant or a time is replaced, without a comment there or a docstring of the function."""
    text = path.read_text(encoding="utf-8")
    lines = ["", *text.splitlines()]
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or ast.get_docstring(function):
            continue
        for call in ast.walk(function):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr == "setattr"
                and isinstance(name := call.args[1], ast.Constant)
                and CONSTANT.fullmatch(str(name.value))
                and "#" not in lines[call.lineno]
                and not lines[call.lineno - 1].strip().startswith("#")
            ):
                yield f"{path.relative_to(TESTS)}:{call.lineno} {name.value}"


def test_what_replaces_a_constant_says_why() -> None:
    found = [where for path in sorted(TESTS.rglob("*.py")) for where in patches_without_reason(path)]
    assert found == [], "write a comment there: what is shipped, and why this test does not run it"
