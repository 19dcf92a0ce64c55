"""Where a request's spans begin and end; nothing happens here for a request that has none."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from preble.core.types import Request
from preble.gateway.requests.attempt import Attempt
from preble.gateway.requests.placed_client import PlacedClient
from preble.serving import Intake, ParsedRequest, Placed, Trace

_UNTRACED = nullcontext()


def tracing(parsed: ParsedRequest, client: PlacedClient) -> AbstractContextManager[None]:
    """A context that ends the spans of a request with it."""
    return _UNTRACED if parsed.trace is None else _traced(parsed.trace, client)


@contextmanager
def _traced(trace: Trace, client: PlacedClient) -> Iterator[None]:
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        trace.end(client.status or getattr(failure, "status", None), failure)


def place(serving: Intake, request: Request, parsed: ParsedRequest) -> Coroutine[Any, Any, Placed]:
    """As `Intake.place`, with the spans of the turn and the decision."""
    placing = serving.place(request, parsed)
    return placing if parsed.trace is None else _traced_placing(placing, parsed.trace)


async def _traced_placing(placing: Coroutine[Any, Any, Placed], trace: Trace) -> Placed:
    loop = asyncio.get_running_loop()
    asked_at = loop.time()
    placed = await placing
    decided_at = max(placed.placed_at, asked_at)
    trace.placed(placed.placement, decided_at - asked_at, loop.time() - decided_at)
    return placed


@contextmanager
def replica_span(trace: Trace, attempt: Attempt, headers: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """A context with the span of one replica. Gives the headers that put the replica's own spans below it."""
    failure: BaseException | None = None
    own = trace.sent(attempt.placed.placement)
    attempt.on_first = own.first_token
    try:
        yield {**headers, **own.headers}
    except BaseException as error:
        failure = error
        raise
    finally:
        attempt.on_first = None
        own.answered(attempt.status, attempt.placed.output_tokens, failure)
