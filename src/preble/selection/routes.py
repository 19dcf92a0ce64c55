"""The routes of the selection service, in one table: what answers them, and what they take and give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs

from preble.core.types.life import FIRST_TOKEN, Alive, Progress
from preble.errors import RequestError
from preble.rules.callers import Caller
from preble.selection.schemas import (
    DEFAULT,
    EndRequest,
    ModelLoad,
    OutputBlockRequest,
    OverlapScores,
    ProgressRequest,
    PromptRequest,
    RenewRequest,
    ReservationRequest,
    ReservationRow,
    SelectRequest,
    SelectResponse,
    WorkerLoad,
    WorkerRecord,
    WorkerRequest,
)
from preble.selection.service import SelectionService

OPENAPI = "/openapi.json"


@dataclass(frozen=True, slots=True)
class RouteCall:
    """One request to a route. `name`: the path's part in braces. `body`: decoded; None where the route takes none."""

    service: SelectionService
    caller: Caller
    name: str
    query: bytes
    body: Any

    @property
    def worker_id(self) -> int:
        """The path's number. Raises: RequestError."""
        if not (self.name.isascii() and self.name.isdigit() and len(self.name) <= 20):
            raise RequestError(f"{self.name[:50]!r} is not a worker's number", param="worker_id")
        return int(self.name)

    @property
    def model_name(self) -> str | None:
        """The query's model, None for any."""
        name = parse_qs(self.query.decode("latin-1")).get("model_name", [DEFAULT])[-1]
        return None if name == DEFAULT else name


Answer = Callable[[RouteCall], Any]


@dataclass(frozen=True, slots=True)
class Route:
    """One method at one path. `answer`: returns what is sent as JSON, or a coroutine of it. `gives`: its type."""

    method: str
    path: str
    summary: str
    gives: Any
    answer: Answer
    takes: type | None = None
    status: int = 200
    changes_workers: bool = False


_ONE = "/reservations/{selection_id}"
ROUTES = (
    Route(
        "POST",
        "/select",
        "Choose a worker",
        SelectResponse,
        lambda call: call.service.select(call.body, call.caller),
        SelectRequest,
    ),
    Route(
        "POST",
        "/select_and_reserve",
        "Choose a worker and reserve it",
        SelectResponse,
        lambda call: call.service.select_and_reserve(call.body, call.caller),
        SelectRequest,
    ),
    Route(
        "POST",
        "/reservations",
        "Reserve what was selected",
        ReservationRow,
        lambda call: call.service.reserve(call.body, call.caller),
        ReservationRequest,
        201,
    ),
    Route("GET", _ONE, "Look at a reservation", ReservationRow, lambda call: call.service.reservation(call.name)),
    Route("DELETE", _ONE, "The request is over", ReservationRow, lambda call: call.service.free(call.name)),
    Route(
        "POST",
        f"{_ONE}/prefill_complete",
        "The prompt is computed",
        ReservationRow,
        lambda call: call.service.report(call.name, FIRST_TOKEN),
    ),
    Route(
        "POST",
        f"{_ONE}/output_block",
        "One more KV block of output",
        ReservationRow,
        lambda call: call.service.output_block(call.name),
        OutputBlockRequest,
    ),
    Route(
        "POST",
        f"{_ONE}/progress",
        "The answer so far",
        ReservationRow,
        lambda call: call.service.report(call.name, Progress(call.body.output_tokens, call.body.cached_tokens)),
        ProgressRequest,
    ),
    Route(
        "POST",
        f"{_ONE}/renew",
        "A sign of life",
        ReservationRow,
        lambda call: call.service.report(call.name, Alive(call.body.lease_s)),
        RenewRequest,
    ),
    Route(
        "POST",
        f"{_ONE}/end",
        "The request is over, and how",
        ReservationRow,
        lambda call: call.service.end(call.name, call.body),
        EndRequest,
    ),
    Route("GET", "/workers", "List the workers", list[WorkerRecord], lambda call: call.service.workers.records()),
    Route(
        "POST",
        "/workers",
        "Register a worker",
        WorkerRecord,
        lambda call: call.service.workers.register(call.body),
        WorkerRequest,
        201,
        changes_workers=True,
    ),
    Route(
        "DELETE",
        "/workers/{worker_id}",
        "Leave a worker when nothing runs there",
        WorkerRecord,
        lambda call: call.service.workers.remove(call.worker_id),
        changes_workers=True,
    ),
    Route(
        "GET",
        "/loads",
        "What every worker has to do",
        list[ModelLoad],
        lambda call: call.service.loads.by_model(call.model_name),
    ),
    Route(
        "POST",
        "/potential_loads",
        "What every worker would have to do with a prompt",
        list[WorkerLoad],
        lambda call: call.service.loads.with_prompt(call.service.asked_about(call.body, call.caller)),
        PromptRequest,
    ),
    Route(
        "POST",
        "/overlap_scores",
        "How much of a prompt each worker has cached",
        OverlapScores,
        lambda call: call.service.loads.overlap(call.service.asked_about(call.body, call.caller)),
        PromptRequest,
    ),
)
TABLE: Mapping[str, Mapping[str, Route]] = MappingProxyType(
    {path: {route.method: route for route in ROUTES if route.path == path} for path in {r.path: None for r in ROUTES}}
)
"""The routes by path and method."""
_NAMED = MappingProxyType({"reservations": "{selection_id}", "workers": "{worker_id}"})


def route_path(path: str) -> tuple[str, str]:
    """Return the path of a route as the table has it, and its part in braces.

    >>> route_path("/reservations/mine/end"), route_path("/select")
    (('/reservations/{selection_id}/end', 'mine'), ('/select', ''))
    """
    parts = path.split("/", 3)
    if len(parts) < 3 or parts[1] not in _NAMED:
        return path, ""
    return "/".join(["", parts[1], _NAMED[parts[1]], *parts[3:]]), parts[2]
