"""An answer that passes through the picker: its tokens, and whether it is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from preble.core.types.life import FIRST_TOKEN
from preble.errors import EngineProtocolError
from preble.gateway.http.events import EVENT_STREAM
from preble.prompts.endpoints import Endpoint, read_retry_after
from preble.serving import Placed, ended, share_usage


class PickedAnswer:
    """The answer to one request, reported to its placements, of which a list of prompts has several.

    `most_bytes`: how much of a whole answer is kept to read its usage.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        placed: Sequence[Placed],
        status: int,
        headers: Mapping[bytes, bytes],
        most_bytes: int,
    ) -> None:
        self._endpoint = endpoint
        self._placed = placed
        self._status = status
        self._is_stream = headers.get(b"content-type", b"").startswith(EVENT_STREAM)
        self._is_plain = headers.get(b"content-encoding", b"identity") == b"identity"
        self._meter = endpoint.meter()
        self._whole = bytearray()
        self._most_bytes = most_bytes
        self._has_begun = False
        self._retry_after_s = read_retry_after(headers.get(b"retry-after", b"").decode("latin-1"))

    def feed(self, piece: bytes) -> None:
        """Take the next piece."""
        if not self._is_plain or not piece:
            return
        if not self._is_stream:
            self._whole += piece[: self._most_bytes - len(self._whole)]
            return
        self._meter.feed(piece)
        if not self._has_begun and self._meter.has_begun:
            self._has_begun = True
            for one in self._placed:
                one.report(FIRST_TOKEN)

    def end(self) -> None:
        """The answer is complete."""
        end = ended(self._flaw(), self._status, self._retry_after_s)
        self.report()
        for one in self._placed:
            one.report(end)

    def report(self) -> None:
        """Report the tokens of a stream so far."""
        if self._has_begun:
            share_usage(self._placed, *self._meter.tokens())

    def _flaw(self) -> EngineProtocolError | None:
        # No variable of a frame below which it was raised may name it: the cycle would keep the answer.
        if not self._is_plain or self._status >= 300:
            return None
        return self._meter.flaw() if self._is_stream else self._flaw_of_whole()

    def _flaw_of_whole(self) -> EngineProtocolError | None:
        if len(self._whole) >= self._most_bytes:
            return None
        try:
            usage = self._endpoint.usage(bytes(self._whole))
        except EngineProtocolError as error:
            return error
        if usage is not None:
            share_usage(self._placed, usage.output_tokens or 0, usage.cached_tokens)
        return None
