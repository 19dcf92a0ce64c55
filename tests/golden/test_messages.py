"""The messages between processes, kept as files: what speaks another form has another version, and is refused.

A package that is upgraded in place starts a process from new files beside one from old files.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
from msgspec import inspect

pytestmark = pytest.mark.plain
FOLDER = Path(__file__).parent / "messages"
MESSAGES = {
    "preble.serving.link.protocol": ("preble.serving.link.protocol", ["ToScheduler", "FromScheduler"]),
    "preble.peers.packets": ("preble.peers.packets", ["_Sealed", "Packet"]),
    "preble.integrations.ray.hub": ("preble.integrations.ray.reports", ["Packet"]),
}
"""Modules with a `VERSION` -> where the messages are for which it stands, and the types of the messages."""


def form(types: Iterable[Any]) -> str:
    """Every type with a name that these types lead to: its fields in order, a line each, without bounds of values."""
    found: dict[str, tuple[type, list[str]]] = {}

    def spelled(value: Any) -> str:
        if isinstance(value, tuple):
            return " | ".join(map(spelled, value))
        if not isinstance(value, inspect.Type):
            return repr(value)
        if hasattr(value, "cls"):
            return define(value)
        kind = type(value).__name__.removesuffix("Type").lower()
        inner = [spelled(getattr(value, name)) for name in value.__struct_fields__ if "type" in name]
        return f"{kind}[{', '.join(inner)}]" if inner else kind

    def define(value: Any) -> str:
        name = value.cls.__name__
        if name not in found:
            found[name] = (value.cls, [])
            found[name][1].extend(contents(value))
        assert found[name][0] is value.cls, f"two messages contain different types that are called {name}"
        return str(name)

    def contents(value: Any) -> Iterator[str]:
        if isinstance(value, inspect.EnumType):
            yield from (repr(member.value) for member in value.cls)
        if isinstance(value, inspect.StructType):
            yield f"tag={value.tag!r}, array_like={value.array_like}"
        for field in getattr(value, "fields", ()):
            yield f"{field.encode_name}: {spelled(field.type)}{'' if field.required else ', optional'}"

    for root in inspect.multi_type_info(types):
        spelled(root)
    return "".join(f"\n{name}\n" + "".join(f"    {line}\n" for line in lines) for name, (_, lines) in found.items())


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is installed in an environment of its own; the messages need nothing of it."""
    for name in ("ray", "ray.exceptions", "ray.serve", "ray.serve.context"):
        monkeypatch.setitem(sys.modules, name, MagicMock())


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_of_another_form_have_another_version(name: str, without_ray: None) -> None:
    version = importlib.import_module(name).VERSION
    module, messages = MESSAGES[name]
    kept = FOLDER / f"{name}.txt"
    now = f"VERSION = {version}\n{form(getattr(importlib.import_module(module), of) for of in messages)}"
    before = kept.read_text(encoding="utf-8") if kept.exists() else ""
    has_new_version = now.partition("\n")[0] != before.partition("\n")[0]
    if os.environ.get("PREBLE_REWRITE_GOLDEN") and has_new_version:
        kept.write_text(now, encoding="utf-8")
        before = now
    assert now == before, (
        f"the messages of {name} have changed, or their version. "
        f"{'' if has_new_version else f'Raise its VERSION above {version}; then '}run `make golden`"
    )


def test_a_form_tells_fields_their_order_types_and_tags_apart() -> None:
    def of(fields: list[Any], **traits: Any) -> str:
        return form([msgspec.defstruct("Some", fields, array_like=True, **traits)])

    forms = {
        of([("a", int), ("b", str)]),
        of([("b", str), ("a", int)]),
        of([("a", int), ("b", str | None)]),
        of([("a", int), ("b", str, "")]),
        of([("a", int), ("b", str)], tag=3),
        of([("a", int), ("b", msgspec.defstruct("Inner", [("c", int)]))]),
        of([("a", int), ("b", msgspec.defstruct("Inner", [("d", int)]))]),
    }
    assert len(forms) == 7
