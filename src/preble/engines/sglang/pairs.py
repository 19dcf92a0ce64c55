"""Two SGLang replicas that answer one request: both get it at once, and meet in a room.

If one leg fails, nobody tells the other one, which hangs. So both are watched, and left together.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from functools import partial

from preble.core.types.life import TRANSFER_FAILED, TRANSFERRED
from preble.engines.json_fields import add_fields_before
from preble.engines.pairs import PairedEngine
from preble.engines.reporting import RANK_HEADER
from preble.engines.sglang.bodies import GENERATING_PATHS, num_answers, without_stream
from preble.errors import EngineError, EngineFailed, EngineRefused, RequestError
from preble.web.client.pool import Ongoing, Receiver
from preble.web.messages import HeaderList

PREFILL_S = 120.0
"""How long the source has for its leg, its queue included, unless the target has no room for the prompt. An SGLang
whose other half is gone hangs for 300 s."""
MOST_PROLONGED = 4
"""How often a pair gets `PREFILL_S` more, since its target has no room. SGLang's own time-outs end most waits at 300 s,
but operators may raise them."""
MOST_REFUSAL_BYTES = 64 * 1024
"""Of a source's answer that is an error, and so the client's. More of it is left out."""

Begin = Callable[[Receiver], Ongoing]
_PAIRED_PATHS = GENERATING_PATHS | {"/v1/responses", "/v1/messages"}
"""Paths whose answers need a prompt computed. The one that decodes answers the others itself."""

_LOST_SOURCE = (b"Lost connection with prefill", b"Decode handshake failed")
"""What one that decodes says once the other one does not answer it."""
_ROOM_BITS = 63


class SglangPair(PairedEngine):
    """Two SGLang replicas, one with each role. Both get the same request at once, and meet by its room.

    Only the one that decodes streams: in a stream the source's failure would be an event, after a status of 200.
    """

    def lost_source(self, answer: bytes) -> bool:
        return any(words in answer for words in _LOST_SOURCE)

    def begin(self, path: str, body: bytes, headers: Mapping[str, str], receiver: Receiver) -> Ongoing:
        """Raises: EngineRefused. RequestError: it asks for several answers, which would end the engine in one room."""
        if path not in _PAIRED_PATHS:
            self.tell(TRANSFER_FAILED)
            return self.decode.begin(path, body, headers, receiver)
        if num_answers(body) > 1:
            raise RequestError("replicas that prefill for others give one answer to a prompt; leave out `n`", param="n")
        if self.prefill.kv_peer is None:  # it has another role since it joined, and leaves the rotation
            self.failed_leg = self.prefill.replica_id
            raise self.prefill.http.error(EngineRefused, "computes no prompts for others any more")
        host, _, port = self.prefill.kv_peer.rpartition(":")
        room = draw_room(self.prefill.num_ranks, self.prefill.rank or 0)
        both = add_fields_before(body, {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": room})
        legs = PairedLegs(self, receiver)
        of_source = {name: value for name, value in headers.items() if name != RANK_HEADER}  # it names who decodes
        legs.begin(
            partial(self.prefill.begin, path, without_stream(both), of_source),
            partial(self.decode.begin, path, both, headers),
        )
        return legs


def draw_room(num_ranks: int, rank: int) -> int:
    """Return a room that has not been used before: SGLang's data-parallel rank is its remainder.

    >>> all(draw_room(4, 3) % 4 == 3 and 0 < draw_room(1, 0) < 2**63 for _ in range(100))
    True
    """
    room = secrets.randbelow(2**_ROOM_BITS // num_ranks - 1) + 1
    return room * num_ranks + rank


class PairedLegs:
    """Both legs of a request, sent at the same time: an `Ongoing`.

    `receiver` gets the answer of the one that decodes. If the source fails before that has sent anything, the other leg
    is cancelled at once, and `receiver` gets the source's error (see `Engine.failed_leg`). One that is late
    has failed, unless the target has no room; see `_on_late`.
    """

    def __init__(self, pair: PairedEngine, receiver: Receiver) -> None:
        self._pair = pair
        self._receiver: Receiver | None = receiver
        self._source: Ongoing | None = None
        self._target: Ongoing | None = None
        self._late: asyncio.TimerHandle | None = None
        self._num_prolonged = 0

    def begin(self, prefill: Begin, decode: Begin) -> None:
        """Send both. Raises: EngineRefused: nothing was sent, or is any more."""
        self._late = asyncio.get_running_loop().call_later(PREFILL_S, self._on_late)
        try:
            self._pair.failed_leg = self._pair.prefill.replica_id
            self._source = prefill(_SourceLeg(self))
            self._pair.failed_leg = None
            self._target = decode(_TargetLeg(self))
            self._pair.on_loss(self.source_failed)
        except BaseException:
            self.abort()
            raise

    def pause(self) -> None:
        if self._target is not None:
            self._target.pause()

    def resume(self) -> None:
        if self._target is not None:
            self._target.resume()

    def abort(self) -> None:
        self._receiver = None
        self._leave_source()
        self._leave_target()

    def _leave_source(self) -> None:
        source, self._source = self._source, None
        self._pair.on_loss(None)
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if source is not None:
            source.abort()

    def _leave_target(self) -> None:
        target, self._target = self._target, None
        if target is not None:
            target.abort()

    def _on_late(self) -> None:
        """Wait on while the target has no room, up to a bound, else leave the one of both that seems to do nothing.

        Both are judged by what this process has seen of them.
        """
        if self.has_begun:  # the prompt is there, whatever the source waits for
            self._leave_source()
            return
        source, target, loop = self._pair.prefill, self._pair.decode, asyncio.get_running_loop()
        since = loop.time() - PREFILL_S
        computes, takes = source.last_leg_at > since, target.last_leg_at > since
        is_full = target.last_output_at > since and (computes or not takes)
        waited_s = PREFILL_S * (1 + self._num_prolonged)
        self._late = None
        if is_full and self._num_prolonged < MOST_PROLONGED:
            self._num_prolonged += 1
            self._late = loop.call_later(PREFILL_S, self._on_late)
        elif computes or is_full:
            self.target_failed(target.http.error(EngineFailed, f"has not taken the prompt within {waited_s:g} s"))
        else:
            text = f"has not computed the prompt for {self._pair.replica_id} within {waited_s:g} s"
            self.source_failed(source.http.error(EngineFailed, text))

    # the source's leg

    def source_ended(self) -> None:
        """The prompt is computed and sent."""
        self._source = None
        self._leave_source()
        now = asyncio.get_running_loop().time()
        self._pair.prefill.last_leg_at = self._pair.decode.last_leg_at = now
        self._pair.tell(TRANSFERRED)

    def source_failed(self, error: EngineError) -> None:
        if self._takes_the_place():
            self.pass_on(lambda receiver: receiver.failed(error))

    def source_refused(self, status: int, headers: HeaderList, body: bytes) -> None:
        """The source has answered with an error, which is the request's answer."""
        if self._takes_the_place():
            self.pass_on(lambda receiver: receiver.answered(status, headers))
            self.pass_on(lambda receiver: receiver.received(body))
            self.pass_on(lambda receiver: receiver.ended())

    def _takes_the_place(self) -> bool:
        """Return whether the source's failure is the answer: not if the other one answers all the same."""
        self._leave_source()
        if self._receiver is None or self.has_begun:
            return False
        self._pair.failed_leg = self._pair.prefill.replica_id
        self._leave_target()
        return True

    # the leg that decodes

    def target_says(self, data: bytes) -> None:
        """Something of its answer has come. It may hear before we do that the source is gone."""
        self._pair.decode.last_output_at = asyncio.get_running_loop().time()
        if not self.has_begun and self._source is not None and self._pair.lost_source(data):
            self._pair.failed_leg = self._pair.prefill.replica_id

    has_begun = False
    """Whether anything of its answer has been passed on."""

    def pass_on(self, say: Callable[[Receiver], None]) -> None:
        """Tell the receiver, unless nobody wants the answer any more."""
        if self._receiver is not None:
            say(self._receiver)

    def target_failed(self, error: EngineError) -> None:
        """It has failed, and so has the request."""
        self._leave_source()
        self._leave_target()
        self.pass_on(lambda receiver: receiver.failed(error))

    def target_over(self) -> None:
        """Its answer is over. What the source still does is for nothing."""
        self._target = None
        self._leave_source()


class _SourceLeg:
    """Reads the source's answer, and keeps nothing of it but an error."""

    def __init__(self, legs: PairedLegs) -> None:
        self._legs = legs
        self._status = 0
        self._headers: HeaderList = []
        self._body = b""

    def answered(self, status: int, headers: HeaderList) -> None:
        self._status, self._headers = status, headers

    def received(self, data: bytes) -> None:
        if self._status >= 300:
            self._body += data[: MOST_REFUSAL_BYTES - len(self._body)]

    def ended(self) -> None:
        if self._status < 300:
            self._legs.source_ended()
        else:
            self._legs.source_refused(self._status, self._headers, self._body)

    def failed(self, error: EngineError) -> None:
        self._legs.source_failed(error)


class _TargetLeg:
    """Passes an answer on, its head with the first of its body: until then the source's error may take its place."""

    def __init__(self, legs: PairedLegs) -> None:
        self._legs = legs
        self._head: tuple[int, HeaderList] | None = None

    def answered(self, status: int, headers: HeaderList) -> None:
        self._head = status, headers

    def received(self, data: bytes) -> None:
        self._legs.target_says(data)
        self._begin()
        self._legs.pass_on(lambda receiver: receiver.received(data))

    def ended(self) -> None:
        self._legs.target_over()
        self._begin()
        self._legs.pass_on(lambda receiver: receiver.ended())

    def failed(self, error: EngineError) -> None:
        self._legs.target_over()
        self._begin()
        self._legs.pass_on(lambda receiver: receiver.failed(error))

    def _begin(self) -> None:
        self._legs.has_begun = True
        if self._head is not None:
            (status, headers), self._head = self._head, None
            self._legs.pass_on(lambda receiver: receiver.answered(status, headers))
