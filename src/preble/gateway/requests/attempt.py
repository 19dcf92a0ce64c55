"""One try to have one replica answer a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from preble.errors import AnswerTooLarge, EngineError, EngineGone, EngineProtocolError, EngineTimeout, PrebleError
from preble.gateway.http.events import EVENT_STREAM, looks_like_events
from preble.gateway.http.retry_after import retry_after_s
from preble.serving import Endpoint, HeaderList, Placed, StreamMeter
from preble.wire.pool import Ongoing


class Sink:
    """Takes a stream of events: `begin` once, with the attempt whose stream it is, then `write`, with whole events or
    parts of them. A PrebleError that they raise ends the attempt."""

    def __init__(self, begin: Callable[[Attempt], None], write: Callable[[bytes], None]) -> None:
        self.begin = begin
        self.write = write


class Attempt:
    """One placement, carried to its replica and back by callbacks: it is the `Receiver` of the answer.

    After `carry`, `status` and `headers` are the answer's, and `flaw` says what was wrong with a stream that
    went to the sink. Other answers are whole, in `body`, and their usage is reported. `has_begun`: whether the sink has
    got anything; then the request cannot move. `answer_id`: of an answer that replicas store.
    `on_first`: called when the first token of a stream has come.
    """

    status = 0
    body = b""
    is_stream = False
    has_begun = False
    answer_id: str | None = None
    on_first: Callable[[], None] | None = None
    flaw: EngineProtocolError | None = None
    _meter: StreamMeter | None = None
    _ongoing: Ongoing | None = None
    _size = 0
    _heard_at: float | None = None
    _late_at = 0.0
    _is_paused = False
    _error: PrebleError | None = None
    _over: asyncio.Future[None] | None = None

    def __init__(self, placed: Placed, endpoint: Endpoint, max_answer_bytes: int, sink: Sink | None) -> None:
        """`max_answer_bytes`: the most that a whole answer may have. `sink`: of a stream, else None."""
        self.placed = placed
        self.headers: HeaderList = []
        self._endpoint = endpoint
        self._max_answer_bytes = max_answer_bytes
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._pieces: list[bytes] = []
        self._idle_s = placed.engine.http.timeouts.idle_s

    async def carry(self, body: bytes, headers: Mapping[str, str], under_way: set[Attempt]) -> None:
        """Send the request. Return at the end of the answer, when the placement has ended as well.

        `under_way`: holds this attempt meanwhile.
        Raises: EngineError. AnswerTooLarge. PrebleError: the sink's.
        """
        placed, self._over = self.placed, self._loop.create_future()
        placed.on_lost, placed.heard_at = self._on_lost, self._last_heard
        self._late_at = self._loop.time() + placed.engine.http.timeouts.first_byte_s
        under_way.add(self)
        try:
            self._ongoing = placed.engine.begin(self._endpoint.path, body, headers, self)
            await self._over
            if self._error is not None:
                raise self._error
        except BaseException as error:
            self._leave(error)
            raise
        else:
            self._leave(self.flaw)
        finally:
            self._error = None  # its traceback refers to this attempt
            under_way.discard(self)

    # what becomes of the request at the replica

    def answered(self, status: int, headers: HeaderList) -> None:
        if not 200 <= status <= 599:
            replica_id = self.placed.placement.replica_id
            text = f"replica {replica_id} answered with status {status}"
            self._fail(EngineProtocolError(text, replica_id=replica_id))
            return
        self.status, self.headers = status, headers
        streams = self._sink is not None and status < 300
        self.is_stream = streams and (self._is_events() or not self._endpoint.by_load)
        if self.is_stream:
            self._meter = self._endpoint.meter()
        if status < 400:
            self.placed.answered(status)
        else:
            shown = 400 if self._endpoint.is_unsupported(status) else status
            self.placed.answered(shown, retry_after_s(self._header(b"retry-after")))

    def received(self, data: bytes) -> None:
        self._heard_at = now = self._loop.time()
        self._late_at = now + self._idle_s
        try:
            if self._meter is None:
                self._take(data)
            elif self.has_begun:
                self._meter.feed(data)
                self._sink.write(data)  # type: ignore[union-attr]
            else:
                self._hold(data, self._meter)
        except PrebleError as error:
            self._fail(error)

    def ended(self) -> None:
        self._ongoing = None
        try:
            if self._meter is None:
                self.body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
                self._report_usage()
                self.answer_id = self._endpoint.id_of(self.body)
            else:
                if not self.has_begun:
                    self._begin(self._meter)
                self.flaw = self._meter.flaw()
        except PrebleError as error:
            self._error = error
        self._finish()

    def failed(self, error: EngineError) -> None:
        self._error = error
        self._finish()

    def _hold(self, data: bytes, meter: StreamMeter) -> None:
        """Keep the beginning of a stream until the prefill is over. Raises: EngineProtocolError: it is no stream."""
        if not self._pieces and (not self._is_events() or not looks_like_events(data)):
            content_type = self._header(b"content-type")
            raise EngineProtocolError(
                f"the replica's answer is not an event stream but {content_type[:100] or 'unnamed'!r}"
            )
        self._pieces.append(data)
        meter.feed(data)
        if meter.has_begun:
            self._begin(meter)

    def _begin(self, meter: StreamMeter) -> None:
        """Raises: EngineProtocolError: the stream is empty, or begins with an error."""
        if not self._pieces:
            raise EngineProtocolError("the replica's answer is empty")
        if (error := meter.error()) is not None:
            raise error
        if not self._endpoint.by_load:
            self.placed.first_token()
        if self.on_first is not None:
            self.on_first()
        self.answer_id = self._endpoint.id_of(b"".join(self._pieces))
        self.has_begun = True
        if self._sink is not None:
            self._sink.begin(self)
            self._sink.write(b"".join(self._pieces))
        self._pieces.clear()

    def _take(self, data: bytes) -> None:
        """Raises: AnswerTooLarge. EngineProtocolError: an error is too large."""
        self._pieces.append(data)
        self._size += len(data)
        if self._size <= self._max_answer_bytes:
            return
        text = f"the answer is larger than {self._max_answer_bytes} bytes"
        if self.status >= 300:  # no client asks for a long error
            raise EngineProtocolError(text)
        raise AnswerTooLarge(f"{text} (`limits.max_answer_bytes`); ask for a stream, or for less")

    def _report_usage(self) -> None:
        """Raises: EngineProtocolError: an answer with a good status is no completion."""
        if self.status < 300 and (usage := self._endpoint.usage(self.body)) is not None:
            self.placed.usage(usage.output_tokens or 0, usage.cached_tokens)

    def _is_events(self) -> bool:
        return self._header(b"content-type").startswith(EVENT_STREAM.decode())

    def _header(self, name: bytes) -> str:
        for given, value in self.headers:
            if given == name:
                return value.decode("latin-1")
        return ""

    # what the client and the gateway do

    def pause(self) -> None:
        """Read no more: the client reads slowly."""
        self._is_paused = True
        if self._ongoing is not None:
            self._ongoing.pause()

    def resume(self) -> None:
        """Read on."""
        self._is_paused = False
        self._late_at = self._loop.time() + self._idle_s
        if self._ongoing is not None:
            self._ongoing.resume()

    def on_time(self, now: float) -> None:
        """Give up if nothing has come for too long."""
        if now < self._late_at or self._is_paused:
            return
        is_silent = not self.status
        what = "did not answer in time" if is_silent else "sent nothing for too long"
        self._fail(self.placed.engine.http.error(EngineTimeout, what, is_silent=is_silent))

    def _on_lost(self, reason: str | None, silent_since: float | None) -> None:
        """The replica has left the rotation. If its machine is silent, give up: the connection will not break."""
        if silent_since is not None and (self._heard_at is None or self._heard_at < silent_since):
            replica_id = self.placed.placement.replica_id
            text = f"replica {replica_id} was taken out of the rotation: {reason}"
            self._fail(EngineGone(text, replica_id=replica_id, is_silent=True))

    def _last_heard(self) -> float | None:
        return self._heard_at

    def _fail(self, error: PrebleError) -> None:
        """Leave the replica, which stops its work."""
        self._error = error
        if self._ongoing is not None:
            self._ongoing.abort()
        self._finish()

    def _finish(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _leave(self, error: BaseException | None) -> None:
        """Leave the engine, which aborts work that is not done, and end the placement."""
        if self._ongoing is not None:
            self._ongoing.abort()
        # These callbacks refer to this attempt, and it to the placement: only a full collection would free the cycle.
        self.placed.on_lost, self.placed.heard_at = None, _unheard
        self._ongoing = self._sink = None
        if self._meter is not None and self.has_begun and not self._endpoint.by_load:
            self.placed.usage(*self._meter.tokens())
        if error is None:
            self.placed.end()
        else:
            self.placed.failed(error)


def _unheard() -> None:
    """A placement that has ended waits for nothing."""
