"""What answers each request: routes, API keys, and an answer in the endpoint's form for every failure."""

from __future__ import annotations

import asyncio
import contextlib
import re

import msgspec
import structlog

from preble.config import GatewayConfig
from preble.errors import PrebleError
from preble.gateway.http.access import NOBODY, UNAUTHORIZED, Browsers, KeyRing
from preble.gateway.http.bodies import BodyMemoryBudget
from preble.gateway.http.headers import PassedHeaders
from preble.gateway.http.page_client import CLIENT_GONE, PageClient
from preble.gateway.http.passed_on import PassedOn
from preble.gateway.http.refusals import FORBIDDEN, STOPPING, not_allowed
from preble.gateway.pages.debug import DEBUG
from preble.gateway.pages.models import MODELS
from preble.gateway.pages.status import METRICS
from preble.gateway.pages.table import Pages
from preble.gateway.requests.json_requests import IntakeSettings, JsonRequest
from preble.gateway.requests.stored import STORED, answer_stored
from preble.gateway.requests.uploads import Uploads
from preble.prompts.endpoints import (
    ENDPOINTS,
    OTHER,
    ErrorForm,
    endpoint_of,
    error_form,
    nearest_path,
)
from preble.rules.callers import Caller
from preble.serving import PageAnswer, PageRequest, Serving
from preble.web.server.answering import Answering, RequestHead
from preble.web.server.awaited import AwaitedRequest, ClientGone
from preble.web.server.connection import ClientConnection

_ADDRESS = re.compile(r"https?://\S+")
_BODIES_HELD = 16
"""How many bodies of the largest size fit into the memory budget."""


class App:
    """Answers every request. One instance serves all connections of one event loop."""

    num_processes = 1
    """How many processes share the memory for bodies."""

    def __init__(self, config: GatewayConfig, serving: Serving, keys: KeyRing) -> None:
        self.bodies = BodyMemoryBudget(0, retry_after_s=0)
        self._serving = serving
        self._use(config, keys)
        self.pages = Pages(serving, self)
        self._log = structlog.get_logger()
        serving.telemetry.numbers.read(lambda: [("preble_body_bytes", (), [float(self.bodies.held)])])
        self.is_draining = False
        """Whether the gateway is about to stop: it is not ready, and connections end with their answers."""

    def reconfigure(self, config: GatewayConfig, keys: KeyRing) -> None:
        """Use other settings from now on. Raises: ConfigError: one is unusable; then nothing has changed."""
        self._serving.reconfigure(config)
        self._use(config, keys)

    def _use(self, config: GatewayConfig, keys: KeyRing) -> None:
        self._limits = config.limits
        self._body_s = config.timeouts.body_s
        held = max(1, _BODIES_HELD // self.num_processes)
        self.bodies.configure(held * config.limits.max_body_bytes, retry_after_s=config.limits.retry_after_s)
        self.keys = keys
        self._metrics_need_key = config.auth.metrics_need_key
        self._uploads = Uploads(self._serving, config)
        self._browsers = Browsers(config, has_keys=keys.has_keys)
        self._intake = IntakeSettings(
            self._serving,
            keys,
            config.limits,
            config.timeouts,
            PassedHeaders(config.auth),
            self.bodies,
            self,
            self._browsers,
        )

    def drain(self, *, leaves: bool = False) -> None:
        """Keep serving, but say "not ready". Requests that wait for a replica fail: another gateway may have one.

        `leaves`: they do not, since the successor of this gateway has what this one has.
        """
        self.is_draining = True
        if not leaves:
            self._serving.replica_wait.stop()

    def accept(self, connection: ClientConnection, head: RequestHead) -> Answering:
        """Return what answers a request: callbacks if it is to be placed, a task for pages and uploads."""
        path = head.path
        endpoint = endpoint_of(path) if head.method == "POST" else None
        if endpoint is None or endpoint.is_upload(head.headers):
            return AwaitedRequest(connection, head, self._handle)
        if path not in ENDPOINTS and (path.startswith(STORED) or self.pages.name_of(path) is not None):
            return AwaitedRequest(connection, head, self._handle)
        return JsonRequest(self._intake, endpoint, connection, head)

    async def answer_passed_on(self, request: PageRequest) -> PageAnswer:
        """Return the answer to a request that another process has passed on."""
        passed_on = PassedOn(request)
        await self._handle(passed_on)
        return passed_on.page_answer()

    async def _handle(self, request: AwaitedRequest | PassedOn) -> None:
        client = PageClient(request)
        client.is_last = lambda: self.is_draining
        # A second cancellation, at the server's very end, meets a client that does not read the error.
        with contextlib.suppress(asyncio.CancelledError):
            await self._answer(client.head.method, client)
        self._count(client)

    def _count(self, client: PageClient) -> None:
        self.count(self._counted_as(client.path), client.status, client.model)

    def count(self, counted_as: str, status: int | None, model: str) -> None:
        """An answer is complete. `counted_as`: the path's label in metrics."""
        if self.bodies.may_collect:
            self.bodies.collect()
        self._serving.telemetry.numbers.add("preble_responses_total", counted_as, str(status), model)

    async def _answer(self, method: str, client: PageClient) -> None:
        """Answer, and make every failure an answer."""
        try:
            if not (await self._answer_browser(method, client) or await self._refuse_page(method, client)):
                await self._route(method, client)
        except ClientGone:
            client.status = CLIENT_GONE
        except asyncio.CancelledError:
            # Only the server cancels this task, at the end of the shutdown's grace; the task ends here.
            await client.fail(STOPPING)
        except Exception as error:  # noqa: BLE001 (the task's root: a failure must not reach the client as a traceback)
            await client.fail(self.form_of(error, client.caller, client.request_id))

    async def _answer_browser(self, method: str, client: PageClient) -> bool:
        """Answer a browser that asks whether a page may send a request. Return whether it does."""
        if not self._browsers.origins or (
            endpoint_of(client.path) is None and not client.path.startswith((MODELS, STORED))
        ):
            return False
        client.browsers = self._browsers.headers(client.headers)
        preflight = self._browsers.preflight(method, client.headers)
        if preflight:
            await client.reply(200, preflight, b"")
        return bool(preflight)

    async def _refuse_page(self, method: str, client: PageClient) -> bool:
        """Refuse what a page in a browser may not send or see. Return whether it does."""
        refusal = self._browsers.refusal(client.headers) if method == "POST" else None
        if refusal is None and self.pages.is_for_admins(client.path):
            refusal = self._browsers.unknown_host(client.headers)
        if refusal is not None:
            await client.fail(refusal)
        return refusal is not None

    def _counted_as(self, path: str) -> str:
        """Return the path as metrics name it: one of few."""
        endpoint = endpoint_of(path)
        return self.pages.name_of(path) or (endpoint.counted_as if endpoint is not None else OTHER)

    def form_of(self, error: Exception, caller: Caller, request_id: str | None) -> ErrorForm:
        """Return the answer for an error. Logs the error unless it is the client's."""
        form = error_form(error if isinstance(error, PrebleError) else PrebleError())
        if not caller.is_admin:
            form = self._without_addresses(form)
        if form.status >= 500:
            is_bug = form.code == "internal_error"
            self._log.error(
                "request_failed",
                request_id=request_id,
                error=str(error),
                code=form.code,
                exc_info=error if is_bug else None,
            )
        return form

    def _without_addresses(self, form: ErrorForm) -> ErrorForm:
        """Return the error without the names of replicas, which are addresses."""
        message = form.message
        for replica_id in sorted(self._serving.replicas, key=len, reverse=True):
            message = message.replace(replica_id, "(address withheld)")
        return msgspec.structs.replace(form, message=_ADDRESS.sub("(address withheld)", message))

    async def _is_let_in(self, client: PageClient) -> bool:
        """Find out who sends the request; refuse it if the caller may not."""
        path = client.path
        needs_admin = self.pages.is_for_admins(path) or (self._metrics_need_key and path == METRICS)
        is_open = endpoint_of(path) is None or self.pages.name_of(path) is not None
        if is_open and not needs_admin and not path.startswith((MODELS, STORED)):  # whatever follows these
            return True
        caller = self.keys.caller(client.headers)
        if caller is None:
            client.caller = NOBODY
            await client.fail(UNAUTHORIZED)
            return False
        client.caller = caller
        if needs_admin and not caller.is_admin:
            await client.fail(FORBIDDEN)
            return False
        return True

    async def _route(self, method: str, client: PageClient) -> None:
        path, endpoint = client.path, endpoint_of(client.path)
        if endpoint is not None:
            client.errors = endpoint.errors
        if not await self._is_let_in(client) or await self.pages.answer(method, client):
            return
        if path.startswith(STORED):
            await answer_stored(client, self._serving, method, path)
        elif endpoint is not None and method == "POST":
            with self.bodies.share() as share:
                await self._uploads.answer(endpoint, client, share)
        elif path in ENDPOINTS:
            await not_allowed(client, method, ["POST"])
        else:
            there, asked = (*ENDPOINTS, *self.pages.paths), path[:200]
            nearest = nearest_path(asked, there)
            text = f"there is no {method} {asked}; {f'did you mean {nearest}? There' if nearest else 'there'} are "
            text += f"{', '.join(there)} and pages below {DEBUG}"
            await client.fail(ErrorForm(404, "invalid_request_error", "not_found", text))

    async def read_body(self, client: PageClient, most_bytes: int) -> bytes:
        """Return a page's body. Raises: BodyTooLarge, BodyTooSlow, Overloaded, ClientGone."""
        with self.bodies.share() as share:
            return await client.read_body(most_bytes, self._body_s, share)

    async def take_picture(self, client: PageClient) -> bytes:
        """Return what the live page shows, for an admin."""
        return msgspec.json.encode(await self._serving.picture())
