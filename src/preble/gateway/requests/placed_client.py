"""The client of one placed request: its key, its body, its answer, and what happens when it goes or takes too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from preble.config import LimitsConfig
from preble.errors import BodyTooSlow, EngineTimeout, PrebleError
from preble.gateway.http.access import NOBODY, UNAUTHORIZED, Browsers, KeyRing
from preble.gateway.http.bodies import BodyMemoryBudget, BodyShare, LimitedBody
from preble.gateway.http.headers import shown_headers
from preble.gateway.http.page_client import CLIENT_GONE
from preble.gateway.http.refusals import STOPPING
from preble.gateway.requests.attempt import Attempt
from preble.prompts.endpoints import JSON_TYPE, Endpoint, ErrorForm, HeaderList
from preble.rules.callers import ANYBODY, Caller
from preble.web.server.answering import Answering, RequestHead
from preble.web.server.connection import ClientConnection


class Application(Protocol):
    """What all clients share."""

    is_draining: bool

    def form_of(self, error: Exception, caller: Caller, request_id: str | None) -> ErrorForm:
        """Return the answer for an error. Logs the error unless it is the client's."""

    def count(self, counted_as: str, status: int | None, model: str) -> None:
        """An answer is complete. `counted_as`: the path's label in metrics."""


class Work(Protocol):
    """What answers one request."""

    def taken(self) -> None:
        """The client has read most of a whole answer that it read slowly."""

    def stop(self) -> None:
        """End: `PlacedClient.over` is called, now or soon."""


@dataclass(frozen=True, slots=True)
class IntakeSettings:
    """How requests are taken in, until the configuration changes.

    `begin`: begins to answer one request, given its client and body. `browsers`: which pages may ask.
    """

    begin: Callable[[PlacedClient, bytes], Work]
    keys: KeyRing
    limits: LimitsConfig
    body_s: float
    bodies: BodyMemoryBudget
    application: Application
    browsers: Browsers


class PlacedClient(Answering):
    """The client of one placed request. `status`: of the answer, None before it begins.

    `caller`: who sends the request; only an admin sees where it was placed. `request_id`: sent with every answer,
    errors included, once it is set. `model`: as metrics name it, "" while unknown. `under_way`: the attempts that are
    at work for it. `memory`: its part of the body budget.
    """

    status: int | None = None
    caller = ANYBODY
    request_id: str | None = None
    model = ""
    _late_at = inf
    _time_s = 0.0
    _work: Work | None = None
    _cause: PrebleError | None = None
    """Why the work is stopped, None if the server ends or the client has gone."""
    _is_over = False

    def __init__(
        self, settings: IntakeSettings, endpoint: Endpoint, connection: ClientConnection, head: RequestHead
    ) -> None:
        super().__init__(connection, head)
        declared = head.declared_bytes
        self.endpoint = endpoint
        self.under_way: set[Attempt] = set()
        self.memory = BodyShare(settings.bodies)
        self.tasks = connection.shared.tasks
        self.loop = connection.loop
        self._settings = settings
        self._body = LimitedBody(settings.limits.max_body_bytes, declared, self.memory)

    # the body

    def on_start(self) -> None:
        self.limit(self._settings.body_s)
        if (refusal := self._settings.browsers.refusal(self.head.headers)) is not None:
            self.fail(refusal)
            self._close(failed=False)
            return
        caller = self._settings.keys.caller(self.head.headers)
        if caller is None:
            self.caller = NOBODY
            self.reply(401, [JSON_TYPE, (b"www-authenticate", b"Bearer")], UNAUTHORIZED.body(self.endpoint.errors))
            self._close(failed=False)
            return
        self.caller = caller
        try:
            self._body.check_declared()
        except PrebleError as error:
            self._refuse(error)

    def on_body(self, data: bytes) -> None:
        if self._is_over:
            return
        try:
            self._body.add(data)
        except PrebleError as error:
            self._refuse(error)

    def on_body_end(self) -> None:
        if self._is_over:
            return
        try:
            body = self._body.whole()
        except PrebleError as error:
            self._refuse(error)
            return
        self._late_at = inf
        work = self._settings.begin(self, body)
        if not self._is_over:
            self._work = work

    def _refuse(self, error: PrebleError) -> None:
        """Answer a request whose body is not complete."""
        self._fail(error)
        self._close(failed=True)

    # the work

    def limit(self, seconds: float) -> None:
        """Give up after this time from now."""
        self._time_s = seconds
        self._late_at = self.loop.time() + seconds

    def on_time(self, now: float) -> None:
        if self.under_way:
            for attempt in tuple(self.under_way):
                attempt.on_time(now)
        if now < self._late_at:
            return
        self._late_at = inf
        if self._work is None:
            self._refuse(BodyTooSlow(f"the body did not arrive within {self._time_s:g} s"))
        else:
            self._cause = EngineTimeout(f"the answer took longer than {self._time_s:g} s")
            self._work.stop()

    def on_gone(self) -> None:
        if not self._is_over:
            self.status = CLIENT_GONE
            self.is_streaming = False  # nobody reads the rest
            self._stop()

    def on_stop(self) -> None:
        if not self._is_over:
            self._stop()

    def on_failed(self, error: Exception) -> None:
        self._fail(error)
        if not self._is_over:
            self._stop()

    def _stop(self) -> None:
        if self._work is None:
            self.over(asyncio.CancelledError())
        else:
            self._work.stop()

    def on_taken(self) -> None:
        if self._work is not None:
            self._work.taken()

    def over(self, error: BaseException | None) -> None:
        """The work has ended: well, with an error, or stopped. Answers if there is no answer yet."""
        if isinstance(error, Exception):
            self._fail(error)
        elif error is not None and self._cause is not None:
            self._fail(self._cause)
        elif error is not None:  # the server ends, or the client has gone
            self.fail(STOPPING)
        self._close(failed=error is not None)

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

    # the answer

    def reply(self, status: int, headers: HeaderList, body: bytes) -> None:
        self.status = status
        super().reply(status, self._shown(headers), body)

    def begin(self, status: int, headers: HeaderList) -> None:
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

    def _close(self, *, failed: bool) -> None:
        """The request is over: count it, and give back its memory."""
        self._is_over = True
        self._late_at = inf
        self._body.clear()
        self._cause = self._work = None
        self.memory.release(failed=failed)
        self._settings.application.count(self.endpoint.counted_as, self.status, self.model)
