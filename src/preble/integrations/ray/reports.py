"""What replicas tell the routers of their deployment: that a prefill is over, and how many tokens a request has had.

Ray tells its routers only that a request is over. Without reports a prefill counts as work until the request's end.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_serve_request_context

from preble import background
from preble.core.types.life import FIRST_TOKEN, Progress, Report
from preble.integrations.ray.hub import COLLECT_S, REPORT, find_hub

_RETRY_S = 1.0


Packet = list[tuple[str, Report]]
"""Facts, each with the id of its request."""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Packet)


def decode_reports(packet: bytes) -> Packet:
    """Return the facts of a packet, each with its request. Raises: msgspec.MsgspecError: it is no such packet."""
    return _decoder.decode(packet)


class Reporter:
    """Make one in each replica, within its event loop, and tell it of each request.

    What cannot be delivered is dropped: reports make placements better, nothing waits for them.
    """

    def __init__(self) -> None:
        context = serve.get_replica_context()
        self._deployment = str(context.replica_id.deployment_id)
        self._name = context.replica_id.unique_id
        self._waiting: Packet = []
        self._has_some = asyncio.Event()
        self._sending = background.keep(self._send, "reports")

    def first_token(self) -> None:
        """The prefill of the call that is being served is over."""
        self.report(_current_request_id(), FIRST_TOKEN)

    def usage(self, output_tokens: int, cached_tokens: int | None = None) -> None:
        """The call that is being served is about to end, after this many tokens of output. `cached_tokens`: of its
        prompt, None if unknown."""
        self.report(_current_request_id(), Progress(output_tokens, cached_tokens))

    def report(self, request_id: str, fact: Report) -> None:
        """Report what has become of a request. Ray itself sees the end of those whose answers pass through it."""
        self._waiting.append((request_id, fact))
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
    """Return the id, at the router, of the call that this replica is serving."""
    return str(_get_serve_request_context()._internal_request_id)
