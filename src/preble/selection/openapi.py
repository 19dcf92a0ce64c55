"""The OpenAPI document of the selection service, made from its routes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

import preble
from preble.selection.routes import ROUTES, Route
from preble.selection.schemas import ErrorAnswer


def routes_page() -> dict[str, Any]:
    """Return the document."""
    given = [kind for route in ROUTES for kind in (route.gives, route.takes) if kind is not None]
    kinds = list(dict.fromkeys([*given, ErrorAnswer]))
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    by_kind = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Preble's selection service", "version": preble.__version__},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {
            str(route.status): {"description": "Done", "content": _json(schemas[route.gives])},
            "default": {"description": "An error", "content": _json(schemas[ErrorAnswer])},
        },
    }
    if parameters := list(_parameters(route)):
        operation["parameters"] = parameters
    if route.takes is not None:
        operation["requestBody"] = {"required": True, "content": _json(schemas[route.takes])}
    return operation


def _parameters(route: Route) -> Iterable[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", route.path):
        kind = "integer" if name == "worker_id" else "string"
        yield {"name": name, "in": "path", "required": True, "schema": {"type": kind}}
    if route.path == "/loads":
        yield {"name": "model_name", "in": "query", "schema": {"type": "string"}}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
