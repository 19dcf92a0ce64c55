"""One request with a JSON body, from its head to the end of its answer, and the client that sends it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import inf
from typing import Protocol, final

from preble.config import LimitsConfig, TimeoutsConfig
from preble.errors import BodyTooSlow, EngineTimeout, PrebleError
from preble.gateway.http.access import NOBODY, UNAUTHORIZED, Browsers, KeyRing
from preble.gateway.http.bodies import BodyMemoryBudget, BodyShare, LimitedBody
from preble.gateway.http.headers import PassedHeaders, answer_headers, shown_headers
from preble.gateway.http.page_client import CLIENT_GONE
from preble.gateway.http.refusals import STOPPING
from preble.gateway.requests.attempt import Attempt
from preble.gateway.requests.prompt_list import answer_prompt_list
from preble.gateway.requests.relay import Relay
from preble.gateway.requests.replies import reply_refusal
from preble.gateway.requests.states import AttemptState, RequestState
from preble.prompts.endpoints import JSON_TYPE, Endpoint, ErrorForm, HeaderList
from preble.rules.callers import ANYBODY, Caller
from preble.serving import Admission, Intake, ParsedRequest
from preble.web.server.answering import Answering, RequestHead, run_until_wait
from preble.web.server.connection import ClientConnection


class Application(Protocol):
    """What all requests share."""

    is_draining: bool

    def form_of(self, error: Exception, caller: Caller, request_id: str | None) -> ErrorForm:
        """Return the answer for an error. Logs the error unless it is the client's."""

    def count(self, counted_as: str, status: int | None, model: str) -> None:
        """An answer is complete. `counted_as`: the path's label in metrics."""


@dataclass(frozen=True, slots=True)
class IntakeSettings:
    """How requests are taken in, until the configuration changes. `browsers`: which pages may ask."""

    serving: Intake
    keys: KeyRing
    limits: LimitsConfig
    timeouts: TimeoutsConfig
    passed: PassedHeaders
    bodies: BodyMemoryBudget
    application: Application
    browsers: Browsers


@final
class JsonRequest(Answering):
    """One request and its answer. The replica's own bytes are the answer to one prompt.

    The usual request has no task: it is prepared at once, and callbacks carry it. A task begins where something has to
    wait: for token ids, a turn, or the prompts of a list.

    `state`: see `states`. `status`: of the answer, None before it begins. `caller`: who sends the request; only an
    admin sees where it was placed. `request_id`: sent with every answer, errors included, once it is set. `model`: as
    metrics name it, "" while unknown. `under_way`: the attempts that are at work for it. `memory`: its part of the body
    budget.
    """

    state = RequestState.READING
    status: int | None = None
    caller = ANYBODY
    request_id: str | None = None
    model = ""
    _late_at = inf
    _time_s = 0.0
    _id: str | None = None
    """The id that it has taken; it may be admitted under another."""
    _parsed: ParsedRequest | None = None
    _admission: Admission | None = None
    _relay: Relay | None = None
    _task: asyncio.Task[None] | None = None
    _cause: PrebleError | None = None
    """Why the work is stopped, None if the server ends or the client has gone."""

    def __init__(
        self, settings: IntakeSettings, endpoint: Endpoint, connection: ClientConnection, head: RequestHead
    ) -> None:
        super().__init__(connection, head)
        self.endpoint = endpoint
        self.under_way: set[Attempt] = set()
        self.memory = BodyShare(settings.bodies)
        self._settings = settings
        self._serving = settings.serving
        self._body = LimitedBody(head, settings.limits.max_body_bytes, self.memory)

    # READING

    def on_start(self) -> None:
        self._limit(self._settings.timeouts.body_s)
        if (refusal := self._settings.browsers.refusal(self.head.headers)) is not None:
            self.fail(refusal)
            self._finish(None)
            return
        caller = self._settings.keys.caller(self.head.headers)
        self.caller = NOBODY if caller is None else caller
        if caller is None:
            self.fail(UNAUTHORIZED)
            self._finish(None)
            return
        try:
            self._body.check_head()
        except PrebleError as error:
            self._finish(error)

    def on_body(self, data: bytes) -> None:
        if self.state is RequestState.READING:
            try:
                self._body.add(data)
            except PrebleError as error:
                self._finish(error)

    def on_body_end(self) -> None:
        if self.state is RequestState.READING:
            try:
                body = self._body.whole()
            except PrebleError as error:
                self._finish(error)
            else:
                self._late_at = inf
                self.state = RequestState.PREPARING
                self._task = run_until_wait(self._run(body), self._connection.loop)
                if self._task is not None:
                    tasks = self._connection.shared.tasks
                    tasks.add(self._task)
                    self._task.add_done_callback(tasks.discard)

    # PREPARING

    async def _run(self, body: bytes) -> None:
        """Run as a task's root: every failure becomes an answer."""
        try:
            await self._answer(body)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 (the client must get no traceback)
            self._finish(error)
        finally:
            self._task = None

    async def _answer(self, body: bytes) -> None:
        serving, settings, endpoint = self._serving, self._settings, self.endpoint
        self.request_id = self._id = serving.ids.take(self.head.headers)
        self._parsed = parsed = await serving.parse(endpoint, self.head.headers, body, self._id, self.caller)
        self.model = serving.replicas.label(parsed.fields.model)
        admission = serving.admitted(parsed)
        self._parsed = parsed = await admission.enter()
        self._admission = admission
        self.request_id = parsed.request_id
        self._limit(settings.timeouts.total_s)
        if endpoint.of_tokens and (own := await serving.answer_here(endpoint, body)) is not None:
            self.reply(200, [JSON_TYPE], own)
        elif parsed.num_prompts > 1:
            await asyncio.sleep(0)  # the prompts need a task
            self.state = RequestState.CARRIED
            await answer_prompt_list(self, parsed, self.relay, at_once=settings.limits.prompts_at_once)
        else:
            self._relay = await self.relay()
            self.state = RequestState.CARRIED
            await self._relay.begin(self, self if parsed.fields.stream else None)
            return
        self._answered()

    async def relay(self, index: int = 0, body: bytes | None = None) -> Relay:
        """Return the relay of one prompt. `body`: for its replica, if that is not the client's own."""
        serving, settings, parsed = self._serving, self._settings, self._parsed
        assert parsed is not None
        if not serving.replicas.num_taking:
            await serving.replica_wait.over()
        request = await serving.tokenize(parsed, index)
        return Relay(
            serving,
            request,
            parsed,
            body=body or parsed.body,
            with_ids=await serving.with_ids(parsed, request),
            headers=settings.passed.of(parsed),
            max_answer_bytes=settings.limits.max_answer_bytes,
            under_way=self.under_way,
        )

    # CARRIED, STREAMING: what becomes of the only prompt

    def begin_stream(self, attempt: Attempt) -> None:
        self.begin(attempt.status, answer_headers(attempt.headers, attempt.placed.placement))
        self.pause_if_full()  # of answers before this one, which it has not read

    def carried(self, attempt: Attempt) -> None:
        try:
            if attempt.state is AttemptState.STREAMED:
                self.end()
            elif attempt.status >= 300:
                reply_refusal(self, attempt)
            else:
                self.reply(attempt.status, answer_headers(attempt.headers, attempt.placed.placement), attempt.body)
        except Exception as error:  # noqa: BLE001 (a failure must not reach the client as a traceback)
            self._finish(error)
        else:
            self._answered()

    def not_carried(self, error: BaseException) -> None:
        self._finish(error)

    def pause_if_full(self) -> None:
        """Pause the attempts that began while the client read slowly, too."""
        if self._connection.is_write_paused:
            self.on_paused()

    def on_paused(self) -> None:
        for attempt in self.under_way:
            attempt.pause()

    def on_resumed(self) -> None:
        for attempt in self.under_way:
            attempt.resume()

    # OWED

    def _answered(self) -> None:
        if self.response_complete:
            self._finish(None)
        else:
            self.state = RequestState.OWED

    def on_taken(self) -> None:
        if self.state is RequestState.OWED:
            self._finish(None)

    # in any state

    def _limit(self, seconds: float) -> None:
        """Give up after this time from now."""
        self._time_s = seconds
        self._late_at = self._connection.loop.time() + seconds

    def on_time(self, now: float) -> None:
        if self.under_way:
            for attempt in tuple(self.under_way):
                attempt.on_time(now)
        if now < self._late_at:
            return
        self._late_at = inf
        if self.state is RequestState.READING:
            self._finish(BodyTooSlow(f"the body did not arrive within {self._time_s:g} s"))
        else:
            self._cause = EngineTimeout(f"the answer took longer than {self._time_s:g} s")
            self._stop()

    def on_gone(self) -> None:
        if self.state is not RequestState.OVER:
            self.status = CLIENT_GONE
            self.is_streaming = False  # nobody reads the rest
            self._stop()

    def on_stop(self) -> None:
        if self.state is not RequestState.OVER:
            self._stop()

    def on_failed(self, error: Exception) -> None:
        self._fail(error)
        self.on_stop()

    def _stop(self) -> None:
        """End the request as it is, now or soon."""
        if (task := self._task or (self._relay and self._relay.moving)) is not None:
            task.cancel()  # its end is the request's: a placement is withdrawn before its request leaves
        else:
            try:
                if self._relay is not None:
                    self._relay.abort()
            finally:
                self._finish(asyncio.CancelledError())

    def _finish(self, error: BaseException | None) -> None:
        """Give back what the request has taken, answer if it has failed and has no answer yet, and count it. Once."""
        if self.state is RequestState.OVER:
            return
        if self.state is RequestState.READING:
            self._body.clear()
        self.state = RequestState.OVER
        self._late_at = inf
        self._relay = None  # it refers to this request: only a full collection would free the cycle
        try:
            if self._admission is not None:
                self._admission.leave()
            if self._id is not None:
                self._serving.ids.release(self._id)
            if self._parsed is not None and (trace := self._parsed.trace) is not None:
                trace.end(self.status or getattr(error, "status", None), error)
        finally:
            if isinstance(error, Exception):
                self._fail(error)
            elif error is not None and self._cause is not None:
                self._fail(self._cause)
            elif error is not None:  # the server ends, or the client has gone
                self.fail(STOPPING)
            self._cause = None
            self.memory.release(failed=error is not None)
            self._settings.application.count(self.endpoint.counted_as, self.status, self.model)

    # the answer

    def reply(self, status: int, headers: HeaderList, body: bytes) -> None:
        self.status = status
        super().reply(status, self._shown(headers), body)

    def begin(self, status: int, headers: HeaderList) -> None:
        self.state = RequestState.STREAMING
        self.status = status
        super().begin(status, self._shown(headers))

    def _shown(self, headers: HeaderList) -> HeaderList:
        if self._settings.application.is_draining:
            self.keep_alive = False
        headers = shown_headers(headers, self.caller, self.request_id)
        browsers = self._settings.browsers
        return [*headers, *browsers.headers(self.head.headers)] if browsers.origins else headers

    def fail(self, form: ErrorForm) -> None:
        """Send an error: as the answer, or as an event of a stream that has begun. Nothing after a whole answer."""
        if self.status is None:
            self.reply(form.status, form.headers(), form.body(self.endpoint.errors))
        elif self.is_streaming:
            self.write(form.event(self.endpoint.errors))
            self.end()

    def _fail(self, error: Exception) -> None:
        self.fail(self._settings.application.form_of(error, self.caller, self.request_id))
