"""Every word in a public name of Preble is in the glossary, or a word of general computing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
STANDARD = Path(__file__).parents[1] / "support" / "standard_words.txt"
ENDINGS = ("", "s", "es", "d", "ed", "ing", "er", "r", "ion", "able", "e", "y", "ies")


def words(name: str) -> list[str]:
    """
    >>> words("ReplicaCache"), words("hit_rate"), words("LMetric")
    (['replica', 'cache'], ['hit', 'rate'], ['l', 'metric'])
    """
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def public_names() -> Iterator[str]:
    """Classes and functions at the top of every public module."""
    for file in sorted((ROOT / "src" / "preble").rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                yield node.name


def explained() -> set[str]:
    """The words in bold in the glossary."""
    terms = re.findall(r"\*\*(.+?)\*\*", GLOSSARY.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {word for term in terms for word in words(term)}


def known(word: str, vocabulary: set[str]) -> bool:
    """Whether the word, or a form of it (plural, participle, noun), is in the vocabulary."""
    stems = {word, *(word.removesuffix(ending) for ending in ENDINGS[1:])}
    return any(stem + ending in vocabulary for stem in stems for ending in ENDINGS)


def test_every_word_of_a_public_name_is_explained_or_standard() -> None:
    vocabulary = explained() | set(STANDARD.read_text(encoding="utf-8").split())
    missing = {name: word for name in public_names() for word in words(name) if not known(word, vocabulary)}
    assert missing == {}, "explain the word in docs/glossary.md, or use a plainer one"


def test_the_standard_words_leave_the_glossary_alone() -> None:
    """A word of our own must not hide in the standard list."""
    own = {"arm", "belief", "door", "drift", "episode", "flight", "holding", "home", "pin", "promise", "slot", "tenure"}
    assert not own & set(STANDARD.read_text(encoding="utf-8").split())
