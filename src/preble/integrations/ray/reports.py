"""What replicas tell the routers of their deployment: that a prefill is over, and how many tokens a request has had.

Ray tells its routers only that a request is over. Without reports a prefill counts as work until the request's end.
"""

from __future__ import annotations

import asyncio
import contextlib
from enum import IntEnum
from typing import Any

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_serve_request_context

from preble import background
from preble.integrations.ray.hub import COLLECT_S, REPORT, find_hub

_RETRY_S = 1.0


class What(IntEnum):
    """What a report says of its request. After `USAGE` Ray says when it ends; it sees no end of the others."""

    TOKEN = 0
    ALIVE = 1
    USAGE = 2
    END = 3


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What has become of one request. `status`: of the answer, as HTTP has it."""

    request_id: str
    what: What
    output_tokens: int = 0
    cached_tokens: int | None = None
    status: int = 200


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Report])


def decode_reports(packet: bytes) -> list[Report]:
    """Return the reports of a packet."""
    return _decoder.decode(packet)


class Reporter:
    """Make one in each replica, within its event loop, and tell it of each request.

    What cannot be delivered is dropped: reports make placements better, nothing waits for them.
    """

    def __init__(self) -> None:
        context = serve.get_replica_context()
        self._deployment = str(context.replica_id.deployment_id)
        self._name = context.replica_id.unique_id
        self._waiting: list[Report] = []
        self._has_some = asyncio.Event()
        self._sending = background.keep(self._send, "reports")

    def first_token(self, request_id: str | None = None) -> None:
        """The prefill of a request is over. `request_id`: of the call that is being served, where not given."""
        self._tell(Report(request_id or _current_request_id(), What.TOKEN))

    def usage(self, output_tokens: int, cached_tokens: int | None = None) -> None:
        """The call that is being served is about to end, after this many tokens of output. `cached_tokens`: of its
        prompt, None if unknown."""
        self._tell(Report(_current_request_id(), What.USAGE, output_tokens, cached_tokens))

    def alive(self, request_id: str) -> None:
        """The request goes on."""
        self._tell(Report(request_id, What.ALIVE))

    def ended(self, request_id: str, status: int, output_tokens: int, cached_tokens: int | None) -> None:
        """A request is over that Ray does not see end."""
        self._tell(Report(request_id, What.END, output_tokens, cached_tokens, status))

    def _tell(self, report: Report) -> None:
        self._waiting.append(report)
        self._has_some.set()

    async def _send(self) -> None:
        hub: Any = None
        while True:
            await self._has_some.wait()
            await asyncio.sleep(COLLECT_S)
            self._has_some.clear()
            packet, self._waiting = _encoder.encode(self._waiting), []
            try:
                hub = hub or await asyncio.to_thread(find_hub, self._deployment)
                await hub.publish.remote(self._name, REPORT, packet)
            except (RayError, ValueError):
                hub = None
                await asyncio.sleep(_RETRY_S)

    async def close(self) -> None:
        """Stop."""
        self._sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sending


def _current_request_id() -> str:
    """The id, at the router, of the call that this replica is serving."""
    return str(_get_serve_request_context()._internal_request_id)
