"""The OpenAPI document and the reference page say what the routes are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.fakes import replicas
from preble.selection.openapi import routes_page
from preble.selection.routes import OPENAPI, ROUTES, TABLE, Route, route_path
from selection.conftest import Select

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "selection-service.md").read_text(encoding="utf-8")
DOCUMENT = json.loads(msgspec.json.encode(routes_page()))


def test_the_document_and_the_page_have_every_route_and_no_other() -> None:
    routes = {(route.method, route.path) for route in ROUTES}
    assert {(method.upper(), path) for path, one in DOCUMENT["paths"].items() for method in one} == routes
    rows = re.findall(r"^\| `([A-Z]+) (/[^`]+)` \|", PAGE, re.MULTILINE)
    assert set(rows) == routes | {("GET", OPENAPI)}


def test_the_page_names_every_field_that_counts() -> None:
    fields = {
        name
        for kind in {route.takes for route in ROUTES} - {None}
        for name, schema in DOCUMENT["components"]["schemas"][kind.__name__]["properties"].items()  # type: ignore[union-attr]
        if schema.get("default", 0) is not None or len(schema) > 1  # else it is read and not used
    }
    assert {name for name in fields if f"`{name}`" not in PAGE} == set()


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_a_route_is_found_by_a_path(route: Route) -> None:
    path, name = route_path(re.sub(r"{\w+}", "a.b:c-1", route.path))
    assert TABLE[path][route.method] is route and name == ("a.b:c-1" if "{" in route.path else "")


def test_every_reference_in_the_document_leads_to_a_schema() -> None:
    found = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(DOCUMENT)))
    assert found == DOCUMENT["components"]["schemas"].keys()


async def test_the_service_serves_its_document_and_keeps_to_it(select: Select) -> None:
    async with replicas(1) as [fake], select([fake.url]) as one:
        assert await one.ask("GET", OPENAPI) == (200, DOCUMENT)
        _, selected = await one.post("/select", token_ids=[1, 2], explain=True)
        _, row = await one.post("/select_and_reserve", token_ids=[1, 2], selection_id="r")
        _, reservation = await one.ask("GET", "/reservations/r")
        [worker] = (await one.ask("GET", "/workers"))[1]
        [load] = (await one.ask("GET", "/loads"))[1]
        for name, answer in (
            ("SelectResponse", selected),
            ("SelectResponse", row),
            ("ReservationRow", reservation),
            ("WorkerRecord", worker),
            ("ModelLoad", load),
        ):
            schema: dict[str, Any] = DOCUMENT["components"]["schemas"][name]
            assert set(schema["required"]) <= answer.keys() <= schema["properties"].keys()
