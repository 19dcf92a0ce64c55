"""The page of the HTTP API: every path, header and error code of the code is on it, and no other path."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from preble import errors
from preble.errors import EngineGone, EngineProtocolError, EngineRefused, EngineTimeout, NoReplicaError, Overloaded
from preble.gateway.http import headers
from preble.gateway.http.access import UNAUTHORIZED
from preble.gateway.http.refusals import FORBIDDEN, STOPPING
from preble.gateway.pages.table import PATHS
from preble.prompts.endpoints import ENDPOINTS, ErrorForm, ErrorStyle, error_form
from preble.prompts.endpoints.shared_fields import NEVER, RULES, CheckedFields, Reserved, SessionFields
from preble.prompts.endpoints.table import BY_PREFIX, NOT_PASSED
from preble.serving import requests, terms
from preble.serving.intake import RANK_HEADER

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "http-api.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
STYLES = {
    ErrorStyle.OPENAI: "OpenAI",
    ErrorStyle.ANTHROPIC: "Anthropic",
    ErrorStyle.RESPONSES: "OpenAI's responses",
}


def paths_in(section: str, column: int = 0) -> set[str]:
    """The paths in one column of a section's tables."""
    rows = [line.split("|")[1:-1] for line in SECTIONS[section].splitlines() if line.startswith("| `/")]
    return {path for row in rows for path in re.findall(r"`(/[^`]*)`", row[column])}


def test_the_page_lists_the_table_of_endpoints() -> None:
    assert paths_in("Placed by prefix") == {endpoint.path for endpoint in BY_PREFIX}
    assert paths_in("Placed by load") == ENDPOINTS.keys() - {endpoint.path for endpoint in BY_PREFIX}


@pytest.mark.parametrize("endpoint", BY_PREFIX, ids=lambda endpoint: endpoint.path)
def test_the_page_names_the_form_of_an_endpoints_errors(endpoint: object) -> None:
    path, style = endpoint.path, endpoint.errors  # type: ignore[attr-defined]
    [row] = [line for line in SECTIONS["Placed by prefix"].splitlines() if line.startswith(f"| `{path}` |")]
    assert row.split("|")[-2].strip() == STYLES[style]


def test_the_page_lists_what_is_answered_here_and_what_is_not_passed() -> None:
    here = {path for path in paths_in("Answered here") if "{" not in path and "…" not in path}
    assert here == set(PATHS)
    assert all(f"`{path}`" in SECTIONS["Placed by load"] for path in NOT_PASSED)


def names_in(part: str, column: int = 0) -> set[str]:
    """The names in one column of a table of headers and fields."""
    text = SECTIONS["Headers and fields of a request"].partition(f"### {part}\n")[2].partition("###")[0]
    rows = [line.split("|")[1:-1] for line in text.partition("| field |")[0].splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([\w.-]+…?)[^`]*`", row[column])}


def test_the_page_lists_what_is_taken() -> None:
    asking = (*terms.TTFT_TARGETS, *terms.TPOT_TARGETS, terms.TOKENS_PER_S, terms.PRIORITY, terms.MAX_WAIT)
    of_sessions = (*requests._SESSIONS, requests._AGENT)
    known = {name.decode() for name in (*asking, *of_sessions, RANK_HEADER)}
    fields = set(SessionFields.__struct_fields__) - set(CheckedFields.__struct_fields__) - {"nvext"}
    others = {"authorization", "x-api-key", "x-request-id", "nvext.agent_hints.priority"}
    of_prompts = {"model", "cache_salt", "max_tokens", "previous_response_id"}
    assert names_in("Taken") == known | fields | others | of_prompts


def test_what_the_page_calls_passed_on_is_not_refused() -> None:
    names = names_in("Passed on")
    assert names == {"traceparent", "baggage", "cache_control", "prompt_cache_retention", "nvext"}
    assert not names & set(CheckedFields.__struct_fields__)
    assert not any(headers.is_not_passed(name.encode()) or name.encode() in headers._NOT_PASSED for name in names)


def test_the_page_lists_the_headers_that_are_dropped() -> None:
    beginnings = {name.decode() + "…" for name in headers._OF_ROUTERS}
    known = {name.decode() for name in headers._NOT_PASSED}
    assert names_in("Refused") - {"auth.forward_authorization"} == known | beginnings


def test_the_page_lists_the_fields_of_routers() -> None:
    raws = {field.name for field in msgspec.structs.fields(Reserved) if field.type is msgspec.Raw}
    text = SECTIONS["Headers and fields of a request"].partition("| field | of |")[2].partition("###")[0]
    assert set(re.findall(r"`(\w+)`", text)) - {"cache_salt", "model"} == raws


def test_the_page_lists_the_values_that_end_an_engine() -> None:
    text = SECTIONS["Headers and fields of a request"].partition("### Values that end an engine")[2]
    rows = "".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| "))
    ids = {"prompt", "input_ids", "token_ids", "input", "items"}
    assert set(re.findall(r"`(\w+)`", rows)) == {*RULES, *NEVER} | ids


def forms() -> list[ErrorForm]:
    """One error of each kind that the gateway makes."""
    requests = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RequestError)
    ]
    others = (NoReplicaError, Overloaded, EngineTimeout, EngineRefused, EngineGone, EngineProtocolError)
    made = [error_form(kind("text")) for kind in (*requests, *others, errors.EngineFailed, errors.PrebleError)]
    return [*made, UNAUTHORIZED, FORBIDDEN, STOPPING]


@pytest.mark.parametrize("form", forms(), ids=lambda form: form.code)
def test_the_page_lists_an_errors_status_and_code(form: ErrorForm) -> None:
    rows = [line for line in SECTIONS["Errors"].splitlines() if line.startswith(f"| {form.status} |")]
    assert any(f"`{form.code}`" in row for row in rows), form
