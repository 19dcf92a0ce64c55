"""One try to have one replica answer a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from preble.core.types.life import FIRST_TOKEN, Lost, Progress
from preble.errors import AnswerTooLarge, EngineError, EngineGone, EngineProtocolError, EngineTimeout
from preble.gateway.http.events import EVENT_STREAM, looks_like_events
from preble.gateway.requests.states import ENDS, AttemptState
from preble.prompts.endpoints import Endpoint, HeaderList, StreamMeter, read_retry_after
from preble.serving import Placed, ReplicaSpan
from preble.web.client.pool import Ongoing

_STREAMS = AttemptState.STREAMS
"""For every token: Python 3.11 takes longer to find it in its class than for the rest of the comparison."""


class Sink(Protocol):
    """Takes a stream of events. A PrebleError that it raises ends the attempt."""

    def begin_stream(self, attempt: Attempt) -> None:
        """The stream begins: from now on the request cannot move. Called at most once, before `write`."""

    def write(self, data: bytes) -> None:
        """Take whole events or parts of them. `data`: not empty."""


class Attempt:
    """One placement, carried to its replica and back by callbacks: it is the `Receiver` of the answer.

    When it is over, `status` and `headers` are the answer's, and `flaw` says what was wrong with a stream that
    went to the sink. Other answers are whole, in `body`, and their usage is reported. `answer_id`: of an answer that
    replicas store.
    """

    state = AttemptState.SENT
    status = 0
    body = b""
    answer_id: str | None = None
    _usage: Progress | None = None
    flaw: EngineProtocolError | None = None
    _meter: StreamMeter | None = None
    _ongoing: Ongoing | None = None
    _last_at: float | None = None
    """When the last piece of the stream came; None before there was one, and after a pause of ours."""
    _size = 0
    heard_at: float | None = None
    _late_at = 0.0
    _is_paused = False

    def __init__(
        self,
        placed: Placed,
        endpoint: Endpoint,
        max_answer_bytes: int,
        on_over: Callable[[Attempt, Exception | None], None],
        sink: Sink | None,
        under_way: set[Attempt],
        gaps: Callable[[float], None] | None,
        span: ReplicaSpan | None,
    ) -> None:
        """`max_answer_bytes`: the most that is kept, of a whole answer and of a stream's beginning. `on_over`: called
        once, when the answer is complete or there is none, and the placement has ended. `sink`: of a stream, else None.
        `under_way`: holds this attempt until it is over. `gaps`: takes each gap between two pieces of a stream, in
        seconds; None: nobody. `span`: of this attempt, if it is traced; ends with it.
        """
        self.placed = placed
        self.headers: HeaderList = []
        self._endpoint = endpoint
        self._max_answer_bytes = max_answer_bytes
        self._on_over: Callable[[Attempt, Exception | None], None] | None = on_over
        self._sink = sink
        self._under_way = under_way
        self._gaps = gaps
        self._span = span
        self._loop = asyncio.get_running_loop()
        self._pieces: list[bytes] = []
        self._idle_s = placed.engine.http.timeouts.idle_s

    def begin(self, body: bytes, headers: Mapping[str, str]) -> None:
        """Send the request. `on_over` may be called before this returns."""
        placed = self.placed
        placed.carried_by(self)
        self._under_way.add(self)
        try:
            self._late_at = self._loop.time() + placed.engine.http.timeouts.first_byte_s
            self._ongoing = placed.engine.begin(self._endpoint.path, body, headers, self)
        except Exception as error:  # noqa: BLE001 (an adapter may be the user's own)
            self._end(error)

    def abort(self) -> None:
        """Leave the replica, which stops its work, because nobody wants the answer: `on_over` is not called."""
        if self.state not in ENDS:
            self._on_over = None
            self._end(asyncio.CancelledError())

    # what becomes of the request at the replica

    def answered(self, status: int, headers: HeaderList) -> None:
        if not 200 <= status <= 599:
            self._end(self.placed.engine.http.error(EngineProtocolError, f"answered with status {status}"))
            return
        self.status, self.headers = status, headers
        streams = self._sink is not None and status < 300
        if streams and (self._is_events() or not self._endpoint.by_load):
            self.state = AttemptState.HELD
            self._meter = self._endpoint.meter()
        else:
            self.state = AttemptState.WHOLE

    def received(self, data: bytes) -> None:
        self.heard_at = now = self._loop.time()
        self._late_at = now + self._idle_s
        try:
            if self._meter is None:
                self._take(data)
            elif self.state is _STREAMS:
                if self._gaps is not None and self._last_at is not None:
                    self._gaps(now - self._last_at)
                self._last_at = now
                self._meter.feed(data)
                self._sink.write(data)  # type: ignore[union-attr]
            else:
                self._hold(data, self._meter)
        except Exception as error:  # noqa: BLE001 (whatever it is, the client must get an answer)
            self._end(error)

    def ended(self) -> None:
        self._ongoing = None
        try:
            self._read_end()
        except Exception as error:  # noqa: BLE001 (whatever it is, the client must get an answer)
            self._end(error)
        else:
            self._end(None)

    def failed(self, error: EngineError) -> None:
        self._end(error)

    def _read_end(self) -> None:
        """Raises: EngineProtocolError: the answer is none of this endpoint."""
        if self._meter is None:
            self.body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            if self.status < 300 and (usage := self._endpoint.usage(self.body)) is not None:
                self._usage = Progress(usage.output_tokens or 0, usage.cached_tokens)
            if self._endpoint.answer_id is not None:
                self.answer_id = self._endpoint.answer_id(self.body)
        else:
            if self.state is AttemptState.HELD:
                self._begin(self._meter)
            self.flaw = self._meter.flaw()

    def _hold(self, data: bytes, meter: StreamMeter) -> None:
        """Keep the beginning of a stream until the prefill is over.

        Raises: EngineProtocolError: it is no stream, or never begins.
        """
        if not self._pieces and (not self._is_events() or not looks_like_events(data)):
            content_type = self._header(b"content-type")
            raise EngineProtocolError(
                f"the replica's answer is not an event stream but {content_type[:100] or 'unnamed'!r}"
            )
        self._pieces.append(data)
        self._size += len(data)
        meter.feed(data)
        if meter.has_begun:
            self._begin(meter)
        elif self._size > self._max_answer_bytes:
            raise EngineProtocolError(f"the replica streamed {self._size} bytes and nothing of an answer")

    def _begin(self, meter: StreamMeter) -> None:
        """Raises: EngineProtocolError: the stream is empty, or begins with an error."""
        if not self._pieces:
            raise EngineProtocolError("the replica's answer is empty")
        if (error := meter.error()) is not None:
            raise error
        if not self._endpoint.by_load:
            self.placed.report(FIRST_TOKEN)
        held = b"".join(self._pieces)
        self._pieces.clear()
        if self._endpoint.answer_id is not None:
            self.answer_id = self._endpoint.answer_id(held)
        self.state = AttemptState.STREAMS
        self._last_at = self.heard_at
        if self._span is not None:
            self._span.until_first().end()
        if self._sink is not None:
            self._sink.begin_stream(self)
            self._sink.write(held)

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

    def _is_events(self) -> bool:
        return self._header(b"content-type").startswith(EVENT_STREAM.decode())

    def _header(self, name: bytes) -> str:
        return next((value.decode("latin-1") for given, value in self.headers if given == name), "")

    # what the client and the gateway do

    def pause(self) -> None:
        """Read no more: the client reads slowly."""
        self._is_paused = True
        self._last_at = None
        if self._ongoing is not None:
            self._ongoing.pause()

    def resume(self) -> None:
        """Read on."""
        self._is_paused = False
        self._last_at = None
        self._late_at = self._loop.time() + self._idle_s
        if self._ongoing is not None:
            self._ongoing.resume()

    def on_time(self, now: float) -> None:
        """Give up if nothing has come for too long."""
        if now < self._late_at or self._is_paused:
            return
        is_silent = not self.status
        what = "did not answer in time" if is_silent else "sent nothing for too long"
        self._end(self.placed.engine.http.error(EngineTimeout, what, is_silent=is_silent))

    def lost(self, loss: Lost) -> None:
        """The replica has left the rotation. If its machine is silent, give up: the connection will not break."""
        silent_since = loss.silent_since
        if silent_since is not None and (self.heard_at is None or self.heard_at < silent_since):
            text = f"was taken out of the rotation: {loss.reason}"
            error = self.placed.engine.http.error(EngineGone, text, is_silent=True)
            self._loop.call_soon(self._end, error)  # not now: who tells us is in the middle of taking it out

    def _end(self, error: BaseException | None) -> None:
        """Leave the replica, which stops work that is not done; end the placement, and report that. Once."""
        if self.state in ENDS:
            return
        unbegun = AttemptState.ANSWERED if error is None else AttemptState.UNANSWERED
        has_begun = self.state is AttemptState.STREAMS
        self.state = AttemptState.STREAMED if has_begun else unbegun
        self._under_way.discard(self)
        on_over, self._on_over = self._on_over, None
        try:
            try:
                if self._ongoing is not None:
                    self._ongoing.abort()  # perhaps of the user's own
            finally:
                self._end_placement(self.flaw if error is None else error)
        except Exception as failure:
            if on_over is None:
                raise
            error = failure  # the relay must hear of the end whatever happens
        finally:
            self._sink = self._ongoing = None
            if self._span is not None:
                self._span.answered(self.status, self.placed.progress.output_tokens, error)
        if on_over is not None:
            on_over(self, error if isinstance(error, Exception) else None)

    def _end_placement(self, error: BaseException | None) -> None:
        if self._meter is not None and self.state is AttemptState.STREAMED and not self._endpoint.by_load:
            self._usage = Progress(*self._meter.tokens())
        if self._usage is not None:
            self.placed.report(self._usage)
        if self.status < 300:
            self.placed.end(error)
        else:
            shown = 400 if self._endpoint.is_unsupported(self.status) else self.status
            self.placed.end(error, status=shown, retry_after_s=read_retry_after(self._header(b"retry-after")))
