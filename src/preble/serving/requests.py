"""A client's request: its id, the fields of its body that placing needs, and room for its prompts."""

from __future__ import annotations

import asyncio
import re
import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

from preble.config import LimitsConfig, TargetsConfig
from preble.core.types import NO_TARGET
from preble.engines.json_fields import add_fields_after
from preble.errors import Overloaded, RequestError
from preble.prompts.endpoints import Endpoint, Fields
from preble.prompts.endpoints.bodies import KnownPrefix, PromptLimits
from preble.prompts.endpoints.shared_fields import SESSION_NAME
from preble.rules.callers import ANYBODY, Caller
from preble.rules.key_limits import KeyLimits
from preble.serving.telemetry.tracing import Trace
from preble.serving.terms import ASKING, MAX_WAIT, PRIORITY, Terms, target_of

SESSION = b"x-session-id"
"""What vLLM reads a session's name from; it puts the name into its KV events."""
_AGENT = b"x-claude-code-agent-id"
_SESSIONS = (SESSION, b"x-claude-code-session-id", b"x-session-affinity", b"session-id")
"""The headers of clients that name their session; the first of them counts, and all of them before the body."""
_SANE_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")


@dataclass
class ParsedRequest:
    """One client's request; not changed once it has `terms`. `body`: for the replica. `headers`: names in lower case.

    `arrived_at`: when all of it had arrived, by the event loop's clock; None if unknown.
    `trace`: its spans, None where there are none. `of_model`: targets of its model, None for none. `num_prompts`: how
    many placements it needs. `session`: that it is of, as its client names it; None if it names none, or none that is
    short and printable.
    """

    endpoint: Endpoint
    headers: Mapping[bytes, bytes]
    body: bytes
    request_id: str
    fields: Fields
    caller: Caller = ANYBODY
    arrived_at: float | None = None
    trace: Trace | None = None
    of_model: TargetsConfig | None = None
    num_prompts: int = field(init=False)
    session: str | None = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompts = len(self.fields.prompts) or 1
        self.session = self._session()

    @cached_property
    def terms(self) -> Terms:
        """On which terms it is placed. Raises: RequestError: a header with a target is wrong."""
        has_rules = self.caller.limits is not None or self.of_model is not None
        may_ask = has_rules or not ASKING.isdisjoint(self.headers)
        target = target_of(self.headers, self.caller, self.of_model) if may_ask else NO_TARGET
        priority, max_wait = self.headers.get(PRIORITY), self.headers.get(MAX_WAIT)
        return Terms(
            self.request_id,
            self.num_prompts * self.fields.num_choices,
            self.fields.model,
            bool(self.fields.stream),
            self.caller,
            None if priority is None else priority.decode("latin-1"),
            None if max_wait is None else max_wait.decode("latin-1"),
            self.fields.service_tier,
            self.arrived_at,
            self.trace is not None and self.trace.is_recording,
            target.ttft_s,
            target.tpot_s,
        )

    def _session(self) -> str | None:
        """Return the name of its session: a sub-agent of Claude Code has one of its own."""
        for header in _SESSIONS:
            if (name := self.headers.get(header)) is not None:
                if header is _SESSIONS[1] and (agent := self.headers.get(_AGENT)) is not None:
                    name = name + b"/" + agent
                return name.decode() if SESSION_NAME.fullmatch(name) else None
        return self.fields.session


def parse_request(
    endpoint: Endpoint,
    headers: Mapping[bytes, bytes],
    body: bytes,
    request_id: str,
    limits: PromptLimits,
    caller: Caller = ANYBODY,
    salts: bool = False,
    arrived_at: float | None = None,
    begun: KnownPrefix | None = None,
) -> ParsedRequest:
    """`salts`: whether the caller's cache salt can go to the replicas. `begun`: the body's text, where token ids of its
    beginning are known.

    Raises: RequestError: the body is not what the endpoint takes, or is surely over a limit.
    """
    fields = (begun and _read_rest(endpoint, begun, limits)) or endpoint.read(body, limits)
    if caller.name and (salt := caller.cache_salt(fields.cache_salt)) != fields.cache_salt:
        fields.cache_salt = salt
        if salts and salt and endpoint.salt_field:
            body = add_fields_after(body, {endpoint.salt_field: salt})
    return ParsedRequest(endpoint, headers, body, request_id, fields, caller, arrived_at)


def _read_rest(endpoint: Endpoint, begun: KnownPrefix, limits: PromptLimits) -> Fields | None:
    """Read all of a body but what is known of its text. Return None if all of it has to be read."""
    rest = begun.rest()
    try:
        fields = endpoint.read(rest, limits)
    except RequestError:
        return None  # the whole body is wrong, too, and says where
    if not begun.is_all_of(fields.prompts, rest):
        return None
    fields.prompts, fields.begun = (), begun
    return fields


class RequestIds:
    """The ids of the requests that are being served, each once."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._numbers = count()
        self._prefix = secrets.token_hex(4)

    def take(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the client's `x-request-id` if it is short, printable and not in use, else a new id. The caller gives
        it back with `release`."""
        own = headers.get(b"x-request-id")
        if own is not None and _SANE_ID.fullmatch(own):
            return self.claim(own.decode())
        return self.claim(f"{self._prefix}-{next(self._numbers):x}")

    @contextmanager
    def taken(self, headers: Mapping[bytes, bytes]) -> Iterator[str]:
        """Hold an id as of `take`."""
        request_id = self.take(headers)
        try:
            yield request_id
        finally:
            self.release(request_id)

    def claim(self, request_id: str) -> str:
        """Return this id, or one made of it if it is in use. The caller gives it back with `release`."""
        if request_id in self._used:
            request_id = f"{request_id}-{self._prefix}-{next(self._numbers):x}"
        self._used.add(request_id)
        return request_id

    def release(self, request_id: str) -> None:
        """The request that claimed this id is over."""
        self._used.discard(request_id)


_TIMES_WHAT_IS_FREE = 4
"""A tenant may have up to this many times as many prompts as there is room for more: none can take all the room."""


class InFlightLimit:
    """Admits requests while there is room for all their prompts, and for more of their tenant and key.

    A prompt counts as often as it is to be answered.
    """

    def __init__(self, limits: LimitsConfig, key_limits: KeyLimits) -> None:
        self._limits = limits
        self._key_limits = key_limits
        self._of_tenant: Counter[str] = Counter()
        self.num_admitted = 0
        """Prompts between admission and the end of their answer."""

    def configure(self, limits: LimitsConfig) -> None:
        """Admit within these limits from now on."""
        self._limits = limits

    def enter(self, terms: Terms, *, again: bool = False) -> None:
        """Admit a request; the caller gives its room back with `leave`. `again`: it was admitted elsewhere before, and
        counts even if there is no room.

        Raises: Overloaded: there is no room now. RequestError: there never is.
        """
        caller, count = terms.caller, terms.num_answers
        if not again:
            self._require_room(caller, count)
        if caller.limits is not None:
            if again:
                self._key_limits.admit_again(caller, count)
            else:
                self._key_limits.admit(caller, count, asyncio.get_running_loop().time())
        self.num_admitted += count
        self._of_tenant[caller.tenant] += count

    def leave(self, terms: Terms) -> None:
        """An admitted request is over."""
        caller, count = terms.caller, terms.num_answers
        self.num_admitted -= count
        self._of_tenant[caller.tenant] -= count
        if caller.limits is not None:
            self._key_limits.release(caller, count)

    def _require_room(self, caller: Caller, count: int) -> None:
        room = self._limits.max_in_flight
        if count > room:
            raise RequestError(f"{count} answers are asked for; at most {room} are given at once", param="prompt")
        if self.num_admitted + count > room:
            raise Overloaded(
                f"{self.num_admitted} prompts are being served, which is the limit; try again soon",
                retry_after_s=self._limits.retry_after_s,
            )
        if caller.tenant:
            self._require_room_of_tenant(caller, count, room - self.num_admitted)

    def _require_room_of_tenant(self, caller: Caller, count: int, free: int) -> None:
        served = self._of_tenant[caller.tenant]
        if served + count > _TIMES_WHAT_IS_FREE * free:
            raise Overloaded(
                f"{served} prompts of this tenant are being served; the rest of the room is for others; try again soon",
                retry_after_s=self._limits.retry_after_s,
            )


class Admission(ABC):
    """What lets one request be placed and answered, from `enter` to `leave`; also a context."""

    @abstractmethod
    async def enter(self) -> ParsedRequest:
        """Return the request to serve: with a new id if a request of another process has the same one.

        Raises: Overloaded: there is no room now. RequestError: there never is.
        """

    @abstractmethod
    def leave(self) -> None:
        """The request is over. Call it once after `enter`."""

    async def __aenter__(self) -> ParsedRequest:
        return await self.enter()

    async def __aexit__(self, *_failure: object) -> None:
        self.leave()


class LocalAdmission(Admission):
    """The admission of one request in this process."""

    __slots__ = ("_limit", "_parsed", "_terms")

    def __init__(self, limit: InFlightLimit, parsed: ParsedRequest) -> None:
        self._limit = limit
        self._parsed = parsed
        self._terms = parsed.terms

    async def enter(self) -> ParsedRequest:
        self._limit.enter(self._terms)
        return self._parsed

    def leave(self) -> None:
        self._limit.leave(self._terms)
