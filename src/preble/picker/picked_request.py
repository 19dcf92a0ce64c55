"""One request that passes through: placed once its body is here, and followed to the end of its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from itertools import count
from types import TracebackType
from typing import Self
from urllib.parse import unquote

from preble.core.types import ReplicaId
from preble.core.types.life import Moved
from preble.errors import BodyTooLarge, NoReplicaError, PrebleError, RequestError
from preble.gateway.http.access import UNAUTHORIZED
from preble.gateway.http.headers import is_not_passed, placement_headers
from preble.gateway.http.page_client import CLIENT_GONE
from preble.gateway.pages.models import MODELS
from preble.gateway.requests.stored import STORED
from preble.gateway.server import Gateway
from preble.picker import ext_proc
from preble.picker.answer import PickedAnswer
from preble.picker.endpoints import destinations, joined, outside, replica_at
from preble.picker.envoy import Message
from preble.prompts.endpoints import Endpoint, ErrorForm, ErrorStyle, endpoint_of, error_form
from preble.rules.callers import ANYBODY
from preble.serving import ParsedRequest, Placed

_RANK = b"x-data-parallel-rank"
_KEYS = ("authorization", "x-api-key")
_PAGES = frozenset({"/v1/models", "/health", "/ping", "/version"})
"""What a replica is asked by `GET`, besides pages of one model or of one stored response."""
_NOT_PASSED = ErrorForm(
    404,
    "invalid_request_error",
    "not_found",
    "the endpoint picker passes on requests to models and nothing else; ask the replica itself for its own paths",
)
_TURNS = count()
"""Requests that need no placing take turns over the endpoints."""


class PickedRequest:
    """A request and its answer, from the gateway's messages to ours. A context: leaving it ends what has not ended.

    Before we reply to a message we record all that ends with it: the gateway may end the stream once it has the reply.
    """

    def __init__(self, gateway: Gateway, on_body: Callable[[], None]) -> None:
        """`on_body`: called when the request's body is complete."""
        self._gateway = gateway
        self._serving = gateway.serving
        self._on_body = on_body
        self._stack = AsyncExitStack()
        self._headers: dict[bytes, bytes] = {}
        self._subset: frozenset[str] | None = None
        self._caller = ANYBODY
        self._endpoint: Endpoint | None = None
        self._body = bytearray()
        self._placed: list[Placed] = []
        self._answer: PickedAnswer | None = None
        self._status: int | None = None
        self._model = ""
        self.has_ended = False
        """Whether the gateway has all that it needs."""

    async def __aenter__(self) -> Self:
        self._stack.callback(self._count)
        self._memory = self._stack.enter_context(self._gateway.bodies.share())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._release()

    def _count(self) -> None:
        path = self._endpoint.counted_as if self._endpoint is not None else "other"
        status = str(self._status or CLIENT_GONE)
        self._serving.telemetry.numbers.add("preble_responses_total", path, status, self._model)

    async def _release(self) -> None:
        """Give back what the request took; a placement that has not ended was cancelled."""
        if self._answer is not None:
            self._answer.report()
            self._answer = None  # with what it keeps of the answer
        for placed in self._placed:
            placed.cancelled()
        self._body.clear()  # what was counted for it is given back; the stream may stay open
        await self._stack.aclose()

    async def replies(self, message: Message) -> Sequence[bytes]:
        """Return what the gateway gets for its message, encoded. Raises: DecodeError: its status is none."""
        try:
            replies = await self._replies(message)
        except PrebleError as error:
            replies = (self._refused(error_form(error)),)
        if self.has_ended:
            await self._release()
        return replies

    async def _replies(self, message: Message) -> Sequence[bytes]:
        match kind := message.WhichOneof("request"):
            case "request_headers":
                return self._begin(message)
            case "request_body":
                return await self._take(message.request_body)
            case "request_trailers":
                return [*await self._pick(ends=False), ext_proc.trailers(kind)]
            case "response_headers":
                return self._answered(message)
            case "response_body":
                return (self._passed_on(message.response_body),)
            case "response_trailers":
                self._end()
                return (ext_proc.trailers(kind),)
        return ()

    def timed_out(self, error: PrebleError) -> bytes:
        """Have the gateway answer the client, who does not send the body."""
        return self._refused(error_form(error))

    def _refused(self, form: ErrorForm) -> bytes:
        """Have the gateway answer the client itself."""
        self.has_ended = True
        self._status = form.status
        return ext_proc.refusal(form, self._endpoint.errors if self._endpoint else ErrorStyle.OPENAI)

    # the request

    def _begin(self, message: Message) -> Sequence[bytes]:
        self._headers = ext_proc.headers_of(message.request_headers)
        self._subset = ext_proc.subset_of(message)
        # Engines unquote too: a path that only we took for another one would reach them unplaced.
        path = unquote(self._headers.get(b":path", b"").partition(b"?")[0].decode("latin-1"))
        method = self._headers.get(b":method", b"")
        if method == b"POST":
            self._endpoint = endpoint_of(path)
        caller = self._gateway.keys.caller(self._headers)
        if caller is None:
            return (self._refused(UNAUTHORIZED),)
        self._caller = caller
        if self._endpoint is None and not (method in (b"GET", b"HEAD") and _is_page(path)):
            return (self._refused(_NOT_PASSED),)
        if path.startswith(STORED) and caller.name:  # nobody here knows whose response it is
            return (self._refused(_NOT_PASSED),)
        if message.request_headers.end_of_stream:
            self._on_body()
            return (self._to(self._any_endpoint()),)
        return ()

    async def _take(self, piece: Message) -> Sequence[bytes]:
        limit = self._gateway.config.limits.max_body_bytes
        if len(self._body) + len(piece.body) > limit:
            raise BodyTooLarge(f"the body has more than {limit} bytes, which is the limit")
        self._memory.grow(len(piece.body))
        self._body += piece.body
        return await self._pick(ends=True) if piece.end_of_stream else ()

    async def _pick(self, *, ends: bool) -> Sequence[bytes]:
        """Choose the endpoint, now that the body is complete, and give the body back."""
        self._on_body()
        body = bytes(self._body)
        self._body.clear()
        if self._endpoint is None:
            return (self._to(self._any_endpoint()), *ext_proc.request_body(body, ends=ends))
        parsed = await self._place(self._endpoint, body)
        destination = destinations(self._serving.replicas, self._placed[0].placement)
        return (self._to(destination, len(parsed.body)), *ext_proc.request_body(parsed.body, ends=ends))

    async def _place(self, endpoint: Endpoint, body: bytes) -> ParsedRequest:
        """Place the request: all its prompts on one replica, since they come in one body."""
        if self._placed:
            raise RequestError("the request's body has ended already")
        serving = self._serving
        request_id = self._stack.enter_context(serving.ids.taken(self._headers))
        parsed = await serving.parse(endpoint, self._headers, body, request_id, self._caller)
        self._model = serving.replicas.label(parsed.fields.model)
        parsed = await self._stack.enter_async_context(serving.admitted(parsed))
        self._placed = await serving.place_together(parsed, lambda: outside(serving.replicas, self._subset))
        return parsed

    def _any_endpoint(self) -> str:
        """Return endpoints for a request that is no completion, in turns. Raises: NoReplicaError."""
        live = self._serving.replicas
        avoid = outside(live, self._subset) | live.held_back
        able = [replica_id for replica_id in live if replica_id not in avoid]
        if not able:
            raise NoReplicaError("no replica is up")
        first = next(_TURNS) % len(able)
        return joined(live, able[first:] + able[:first])

    def _to(self, destination: str, body_bytes: int | None = None) -> bytes:
        auth = self._gateway.config.auth
        changed: dict[bytes, bytes] = {}
        if body_bytes is not None and b"content-length" in self._headers:
            changed[b"content-length"] = b"%d" % body_bytes
        if self._placed and (rank := self._placed[0].engine.rank) is not None:
            changed[_RANK] = b"%d" % rank
        removed = [name.decode("latin-1") for name in self._headers if is_not_passed(name)]
        if self._gateway.keys.has_keys and not auth.forward_authorization:
            removed += _KEYS
        if auth.engine_api_key is not None:
            changed[b"authorization"] = b"Bearer " + auth.engine_api_key.encode()
            removed = [name for name in removed if name != "authorization"]
        return ext_proc.to_endpoint(destination, changed, removed)

    # the answer

    def _answered(self, message: Message) -> Sequence[bytes]:
        self._memory.shrink(self._memory.held)
        changed: dict[bytes, bytes] = {}
        headers = ext_proc.headers_of(message.response_headers)
        self._status = ext_proc.status_of(headers)
        if self._placed and self._endpoint is not None and self._answer is None:
            if served := ext_proc.served_of(message):
                self._moved(replica_at(self._serving.replicas, served))
            self._answer = PickedAnswer(
                self._endpoint, self._placed, self._status, headers, self._gateway.config.limits.max_answer_bytes
            )
            if self._caller.is_admin:
                changed = dict(placement_headers([placed.placement for placed in self._placed]))
        if message.response_headers.end_of_stream:
            self._end()
        return (ext_proc.answer_headers(changed),)

    def _moved(self, to: ReplicaId | None) -> None:
        """The gateway has reached another endpoint than the chosen one."""
        for placed in self._placed:
            if to is not None and to != placed.placement.replica_id:
                placed.report(Moved(to))

    def _passed_on(self, piece: Message) -> bytes:
        if self._answer is not None:
            self._answer.feed(piece.body)
        if piece.end_of_stream:
            self._end()
        return ext_proc.answer_body(piece.body, ends=piece.end_of_stream)

    def _end(self) -> None:
        self.has_ended = True
        if self._answer is not None:
            self._answer.end()


def _is_page(path: str) -> bool:
    # `endpoint_of` takes plain segments only, so no `..`.
    return path in _PAGES or (path.startswith((f"{MODELS}/", STORED)) and endpoint_of(path) is not None)
