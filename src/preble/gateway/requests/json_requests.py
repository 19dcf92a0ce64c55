"""One request with a JSON body, from its body to the end of its answer."""

from __future__ import annotations

import asyncio
from typing import final

from preble.config import GatewayConfig
from preble.gateway.http.headers import PassedHeaders, answer_headers
from preble.gateway.requests.at_once import run_until_wait
from preble.gateway.requests.attempt import Attempt
from preble.gateway.requests.placed_client import PlacedClient
from preble.gateway.requests.prompt_list import answer_prompt_list
from preble.gateway.requests.relay import Relay
from preble.gateway.requests.replies import reply_refusal
from preble.prompts.endpoints import JSON_TYPE
from preble.serving import Admission, Intake, ParsedRequest


class JsonRequests:
    """Answers requests whose bodies are JSON, to every endpoint of the table."""

    def __init__(self, serving: Intake, config: GatewayConfig) -> None:
        self.serving = serving
        self.total_s = config.timeouts.total_s
        self.limits = config.limits
        self.passed = PassedHeaders(config.auth)

    def begin(self, client: PlacedClient, body: bytes) -> JsonRequest:
        """Begin to answer one request."""
        request = JsonRequest(self, client)
        request.begin(body)
        return request


@final
class JsonRequest:
    """One request and its answer. The replica's own bytes are the answer to one prompt.

    The usual request has no task: it is prepared at once, and callbacks carry it. A task begins where something has to
    wait: for token ids, a turn, or the prompts of a list.
    """

    def __init__(self, settings: JsonRequests, client: PlacedClient) -> None:
        self._settings = settings
        self._serving = settings.serving
        self._client = client
        self._id: str | None = None
        self._parsed: ParsedRequest | None = None
        self._admission: Admission | None = None
        self._relay: Relay | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    def begin(self, body: bytes) -> None:
        """Answer the request."""
        client = self._client
        self._task = run_until_wait(self._run(body), client.loop)
        if self._task is not None:
            client.tasks.add(self._task)
            self._task.add_done_callback(client.tasks.discard)

    async def _run(self, body: bytes) -> None:
        """Run as a task's root: every failure becomes an answer."""
        try:
            await self._answer(body)
        except asyncio.CancelledError as error:
            self._end(error)
        except Exception as error:  # noqa: BLE001 (a failure must not reach the client as a traceback)
            self._end(error)
        finally:
            self._task = None

    async def _answer(self, body: bytes) -> None:
        client, serving = self._client, self._serving
        headers, endpoint = client.head.headers, client.endpoint
        client.request_id = self._id = serving.ids.take(headers)
        self._parsed = parsed = await serving.parse(endpoint, headers, body, self._id, client.caller)
        client.model = serving.replicas.label(parsed.model)
        admission = serving.admitted(parsed)
        self._parsed = parsed = await admission.enter()
        self._admission = admission
        client.request_id = parsed.request_id
        client.limit(self._settings.total_s)
        if endpoint.of_tokens and (own := await serving.answer_here(endpoint, body)) is not None:
            client.reply(200, [JSON_TYPE], own)
        elif parsed.num_prompts > 1:
            await asyncio.sleep(0)  # the prompts need a task
            await answer_prompt_list(client, parsed, self.relay, at_once=self._settings.limits.prompts_at_once)
        else:
            self._relay = await self.relay()
            await self._relay.begin(self, client if parsed.fields.stream else None)
            return
        self._answered()

    async def relay(self, index: int = 0, body: bytes | None = None) -> Relay:
        """Return the relay of one prompt. `body`: for its replica, if that is not the client's own."""
        serving, parsed = self._serving, self._parsed
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
            headers=self._settings.passed.of(parsed),
            max_answer_bytes=self._settings.limits.max_answer_bytes,
            under_way=self._client.under_way,
        )

    # what becomes of the only prompt

    def begun(self, attempt: Attempt) -> None:
        self._client.begin(attempt.status, answer_headers(attempt.headers, attempt.placed.placement))
        self._client.pause_if_full()  # of answers before this one, which it has not read

    def carried(self, attempt: Attempt) -> None:
        client = self._client
        try:
            if attempt.is_stream:
                client.end()
            elif attempt.status >= 300:
                reply_refusal(client, attempt)
            else:
                client.reply(attempt.status, answer_headers(attempt.headers, attempt.placed.placement), attempt.body)
        except Exception as error:  # noqa: BLE001 (a failure must not reach the client as a traceback)
            self._end(error)
        else:
            self._answered()

    def not_carried(self, error: BaseException) -> None:
        self._end(error)

    # the end

    def _answered(self) -> None:
        if self._client.response_complete:  # a whole answer takes memory until most of it has been read
            self._end(None)

    def taken(self) -> None:
        """The client has read most of its answer."""
        self._end(None)

    def stop(self) -> None:
        """End the request as it is."""
        if (task := self._task or (self._relay and self._relay.moving)) is not None:
            task.cancel()  # its end is the request's: a placement is withdrawn before its request leaves
        else:
            try:
                if self._relay is not None:
                    self._relay.abort()
            finally:
                self._end(asyncio.CancelledError())

    def _end(self, error: BaseException | None) -> None:
        """Give back what the request has taken, and answer if it has failed. Once."""
        if self._is_over:
            return
        self._is_over = True
        self._relay = None  # it refers to this request: only a full collection would free the cycle
        try:
            if self._admission is not None:
                self._admission.leave()
            if self._id is not None:
                self._serving.ids.release(self._id)
            if self._parsed is not None and (trace := self._parsed.trace) is not None:
                trace.end(self._client.status or getattr(error, "status", None), error)
        finally:
            self._client.over(error)
