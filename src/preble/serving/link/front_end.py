"""A front end: this process takes requests in, and another one places them. See docs/concepts/workers.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from preble.config import GatewayConfig
from preble.core.types import Request
from preble.errors import UnknownRequest
from preble.logs import LogLosses
from preble.prompts.tokens import make_token_source
from preble.serving.intake import Intake
from preble.serving.link import protocol as m
from preble.serving.link.by_load import PlacingByLoad, shared_limits
from preble.serving.link.link import LinkedPlaced, SchedulerAway, SchedulerLink, Ticket
from preble.serving.placed import Placed
from preble.serving.requests import Admission, ParsedRequest
from preble.serving.telemetry.metrics import Telemetry
from preble.serving.telemetry.tracing import make_tracing
from preble.serving.terms import Terms

_OWN_ID = b"x-request-id"
_PLACED_UNASKED_BYTES = 16 * 1024
"""Tokenizing a smaller body takes less time than the answer about its admission, so we do not wait for that."""


class FrontEnd(Intake):
    """The scheduler process places the requests; while it is away, this process places them by load.

    `share`: how many front ends divide the limit of prompts at once among them meanwhile.
    """

    def __init__(self, config: GatewayConfig, path: Path, name: str, share: int, log_losses: LogLosses | None) -> None:
        """Use `connect`."""
        telemetry = Telemetry(log_losses, config.metrics, log=config.log, process=name)
        self._here = here = PlacingByLoad(config, share, telemetry, self._suspect)
        tokens = make_token_source(config, here.replicas.engines_for, here.replicas.suspect)
        super().__init__(config, here.replicas, telemetry, tokens, self._admission, self._place_by_ticket)
        self._share = share
        self._tickets: dict[str, Ticket] = {}
        self._link = SchedulerLink(
            path, name, tokens.identity, self._use, here.replicas.engine, telemetry.numbers.state
        )

    @classmethod
    async def connect(
        cls, config: GatewayConfig, path: Path, *, name: str, share: int = 1, log_losses: LogLosses | None = None
    ) -> FrontEnd:
        """Load the tokenizer and start to connect to the scheduler process at `path`; does not wait for it.

        `name`: this process's, for the scheduler process's log and for metrics.
        Raises: ConfigError: a setting is unusable.
        """
        tracing = make_tracing(config.tracing)
        front_end = cls(config, path, name, share, log_losses)
        front_end.tracing = tracing
        return front_end

    def _use(self, message: m.Replicas) -> None:
        self._here.use(message.rows)

    def _suspect(self, replica_id: str) -> None:
        self._link.tell(m.Suspect(replica_id))

    @property
    def is_led(self) -> bool:
        """Whether the scheduler process is connected."""
        return self._link.is_up

    def reconfigure(self, config: GatewayConfig) -> None:
        """Use other settings from now on, where they can be changed: see `preble.config.reloading`."""
        self._config = config
        self.replica_wait.configure(config.timeouts.no_replica_wait_s)
        self._here.limit.configure(shared_limits(config, self._share))

    async def close(self) -> None:
        """Disconnect from the scheduler process and the replicas. End every placement first."""
        await self._link.close()
        self._tokens.close()
        await self._here.close()
        await self._close_tracing()

    async def page(
        self, method: str, path: str, query: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> m.PageAnswer:
        """Have the scheduler process answer an HTTP request. Raises: SchedulerAway."""
        return await self._link.page(method, path, query, list(headers), body)

    # from a request to a placement

    def _admission(self, parsed: ParsedRequest) -> RemoteAdmission:
        return RemoteAdmission(self._here, self._link, self._tickets, parsed)

    def _place_by_ticket(self, request: Request, terms: Terms) -> Coroutine[Any, Any, Placed]:
        return self._place_with(request, self._tickets[terms.request_id])

    async def _place_with(self, request: Request, ticket: Ticket) -> Placed:
        caller, on_end = ticket.terms.caller, None
        if caller.limits is not None:
            on_end = partial(self._here.used, caller, 0)
        try:
            placed = await self._link.place(request, ticket, partial(self._place_again, request, ticket), on_end)
        except SchedulerAway:
            return self._here.place(request, ticket.terms)
        if caller.limits is not None:
            self._here.used(caller, 0, request.num_prompt_tokens)
        return placed

    async def _place_again(self, request: Request, ticket: Ticket, ended: LinkedPlaced) -> Placed:
        avoiding = dataclasses.replace(request, avoid=request.avoid | {ended.blamed})
        try:
            return await self._link.place_again(ended, partial(self._place_again, avoiding, ticket))
        except (SchedulerAway, UnknownRequest):  # the scheduler process has restarted meanwhile
            return await self._place_with(avoiding, ticket)


class RemoteAdmission(Admission):
    """The admission of one request by the scheduler process, or by this one while that is away."""

    __slots__ = ("_here", "_link", "_own", "_parsed", "_ticket", "_tickets")

    def __init__(
        self, here: PlacingByLoad, link: SchedulerLink, tickets: dict[str, Ticket], parsed: ParsedRequest
    ) -> None:
        self._here = here
        self._link = link
        self._tickets = tickets
        self._parsed = parsed
        self._own: Terms | None = None
        """What counts in this process, if the scheduler process was away."""

    async def enter(self) -> ParsedRequest:
        terms = self._parsed.terms
        if is_led := self._link.is_up:
            if terms.caller.limits is not None:
                self._here.used(terms.caller, 1, 0)
        else:
            own = self._here.share_of(terms)
            self._here.limit.enter(own)
            self._own = own
        # Nothing is placed before a replica is there: only the scheduler process bounds how many wait for that.
        waits = is_led and (_waits(self._parsed) or not self._here.replicas.num_taking)
        self._ticket = self._link.admit(terms, at_once=waits or terms.caller.limits is not None)
        try:
            if waits:
                request_id = await self._ticket.granted()
                if request_id != self._parsed.request_id:
                    self._parsed = dataclasses.replace(self._parsed, request_id=request_id)
        except BaseException:
            self._leave()
            raise
        self._tickets[self._parsed.request_id] = self._ticket
        return self._parsed

    def leave(self) -> None:
        del self._tickets[self._parsed.request_id]
        self._leave()

    def _leave(self) -> None:
        self._link.leave(self._ticket)
        if self._own is not None:
            self._here.limit.leave(self._own)


def _waits(parsed: ParsedRequest) -> bool:
    """Return whether to wait for the answer about the admission: the client chose the id, the request is much work, or
    it is placed late or not at all.
    """
    if parsed.endpoint.of_tokens or not parsed.body:
        return True
    return _OWN_ID in parsed.headers or len(parsed.body) > _PLACED_UNASKED_BYTES or parsed.num_prompts > 1
