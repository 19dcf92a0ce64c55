"""What an emulated model says where the request fixes the form: JSON for a schema, a call of a tool. All made up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Schema = Mapping[str, Any]

_DEEPEST = 20
"""Levels of a schema that refers to itself; below them optional fields are left out, and lists are empty."""
_WORDS = "emulated"
_FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "date": "2026-01-01",
        "time": "12:00:00Z",
        "date-time": "2026-01-01T12:00:00Z",
        "duration": "P1D",
        "email": "emulated@example.com",
        "hostname": "example.com",
        "ipv4": "192.0.2.1",
        "ipv6": "2001:db8::1",
        "uri": "https://example.com/",
        "uuid": "00000000-0000-4000-8000-000000000000",
    }
)


@dataclass(frozen=True, slots=True)
class Content:
    """A fixed answer: `text`, or where `tool` is set, the arguments of a call of that tool."""

    text: str
    tool: str | None = None


def content_of(body: Any) -> Content | None:
    """Return what a chat's `tool_choice`, `tools`, `response_format` or `structured_outputs` asks for, None for prose.

    It calls the first tool that it may call, and answers the tool's result in prose, so that an agent ends.
    """
    if (tool := _tool_to_call(body)) is not None:
        function = tool.get("function") or {}
        return Content(_json(function.get("parameters") or {"type": "object"}), str(function.get("name")))
    form = body.response_format or {}
    match form.get("type"):
        case "json_schema":
            return Content(_json((form.get("json_schema") or {}).get("schema") or {}))
        case "json_object":
            return Content(_json({"type": "object", "properties": {"answer": {"type": "string"}}}))
    wanted = body.structured_outputs or {}
    if isinstance(wanted.get("json"), dict):
        return Content(_json(wanted["json"]))
    if choices := wanted.get("choice"):
        return Content(str(choices[0]))
    return None


def _tool_to_call(body: Any) -> dict[str, Any] | None:
    tools = [tool for tool in body.tools or () if isinstance(tool, dict)]
    choice = body.tool_choice
    if isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name")
        return next((tool for tool in tools if (tool.get("function") or {}).get("name") == name), None)
    has_result = body.messages[-1].get("role") == "tool"
    may_call = choice == "required" or (choice in (None, "auto") and not has_result)
    return tools[0] if tools and may_call else None


def _json(schema: Schema) -> str:
    return json.dumps(value_for(schema, schema))


def value_for(schema: Any, root: Schema, depth: int = 0) -> Any:
    """Return a value that a JSON schema allows; `pattern` and `not` are not looked at. `root`: where references begin.

    >>> value_for({"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}}}, {})
    {'n': 3}
    >>> value_for({"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2}, {})
    ['a', 'a']
    """
    if not isinstance(schema, Mapping):
        return _WORDS
    schema = _resolved(schema, root)
    if "const" in schema:
        return schema["const"]
    for name in ("enum", "examples"):
        if isinstance(values := schema.get(name), Sequence) and values:
            return values[0]
    for name in ("anyOf", "oneOf"):
        if branches := schema.get(name):
            return value_for({**schema, **_resolved(_least(branches, depth), root), name: None}, root, depth + 1)
    if parts := schema.get("allOf"):
        merged: dict[str, Any] = {**schema, "allOf": None}
        for part in parts:
            merged = _merged(merged, _resolved(part, root))
        return value_for(merged, root, depth + 1)
    return _of_type(schema, root, depth)


def _resolved(schema: Schema, root: Schema) -> Schema:
    for _ in range(_DEEPEST):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        found: Any = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            found = found.get(part, {}) if part and isinstance(found, Mapping) else found
        schema = {**found, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def _least(branches: Sequence[Any], depth: int) -> Schema:
    """Return the first branch; deep inside, one that ends the recursion if there is one."""
    ending = [branch for branch in branches if isinstance(branch, Mapping) and branch.get("type") == "null"]
    chosen = ending[0] if ending and depth > _DEEPEST // 2 else branches[0]
    return chosen if isinstance(chosen, Mapping) else {}


def _merged(first: Schema, second: Schema) -> dict[str, Any]:
    properties = {**(first.get("properties") or {}), **(second.get("properties") or {})}
    required = [*(first.get("required") or ()), *(second.get("required") or ())]
    return {**first, **second, **({"properties": properties, "required": required} if properties else {})}


def _of_type(schema: Schema, root: Schema, depth: int) -> Any:
    kind = schema.get("type") or ("object" if "properties" in schema else "array" if "items" in schema else "string")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    match kind:
        case "object":
            return _object(schema, root, depth)
        case "array":
            least = schema.get("minItems", 0 if depth > _DEEPEST else 1)
            item = schema.get("prefixItems") or []
            values = [value_for(one, root, depth + 1) for one in item]
            count = max(min(least, schema.get("maxItems", least)), 0) - len(values)
            return values + [value_for(schema.get("items", {}), root, depth + 1) for _ in range(count)]
        case "integer" | "number":
            return _number(schema, kind)
        case "boolean":
            return True
        case "null":
            return None
    text = _FORMATS.get(str(schema.get("format")), _WORDS)
    text += "." * (schema.get("minLength", 0) - len(text))
    return text[: schema["maxLength"]] if "maxLength" in schema else text


def _object(schema: Schema, root: Schema, depth: int) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    shown = properties if depth <= _DEEPEST else {name: properties.get(name, {}) for name in schema.get("required", ())}
    missing: dict[str, Any] = {name: {} for name in schema.get("required", ()) if name not in properties}
    return {name: value_for(inner, root, depth + 1) for name, inner in {**shown, **missing}.items()}


def _number(schema: Schema, kind: str) -> int | float:
    step = 1 if kind == "integer" else 0.5
    low, high = schema.get("minimum"), schema.get("maximum")
    if (above := schema.get("exclusiveMinimum")) is not None and not isinstance(above, bool):
        low = above + step
    if (below := schema.get("exclusiveMaximum")) is not None and not isinstance(below, bool):
        high = below - step
    value = low if low is not None else min(high, 1) if high is not None else 1
    if multiple := schema.get("multipleOf"):
        value = -(-value // multiple) * multiple
    return int(value) if kind == "integer" else float(value)
