"""A function's docstring begins with a verb, so that its reader knows who does what."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
WORDS = """
    a an the as of at in on by to from for with within between over past during until if
    every all each those these its this it that there their our is are has
    what how whether when where which why who whose
    one two three some another more nobody nothing no none something such only everything
    blocks bytes capacity hashes ids keys length lines mean memory number output placements prefixes prompt prompts
    replicas requests returns seconds share token tokens true yields
"""
NO_VERBS = frozenset(WORDS.split())
"""What docstrings began with that had no verb: articles, question words, prepositions, our commonest nouns."""


def functions_with_a_value() -> Iterator[tuple[str, str]]:
    """Yield the place and the docstring of every function that returns something and is not a property.

    A function that returns nothing may be the name of an event; its docstring then says what has happened.
    """
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                returns = ast.unparse(node.returns) if node.returns else "None"
                if returns != "None" and not any("property" in ast.unparse(name) for name in node.decorator_list):
                    yield f"{path.relative_to(SRC)}:{node.lineno} {node.name}", text


def test_the_docstring_of_a_function_with_a_value_begins_with_a_verb() -> None:
    found = list(functions_with_a_value())
    begin = [(place, text, re.match(r"[A-Za-z]+", text)) for place, text in found]
    assert len(found) > 1000
    assert [f"{place}: {text[:60]}" for place, text, first in begin if first and first[0].lower() in NO_VERBS] == []
