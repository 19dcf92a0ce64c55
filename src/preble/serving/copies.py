"""Copies of prefixes between replicas, carried out before the request goes to its replica.

A replica copies what it is asked to compute. So it gets a request of its own: the prefix and one token more, one token
out, and where the prefix is. The client's request follows, as it came, once that is answered. It finds the prefix in
the cache, and whoever carries it needs to know nothing of copies.

vLLM 0.32 has two traps here (docs/reference/engine-facts.md). Two prompts under one `kv_request_id` end the engine, so
each copy has an id of its own. A lost connection leaves a replica unable to copy, though it waits 30 s each time: the
wait here has a bound, and a replica whose copies fail again and again is left out until it joins anew.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import structlog

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import TOKEN_BYTES, PackedTokens, Request, Role, Transfer, TransferKind, unpack_tokens
from preble.core.types.life import TRANSFER_FAILED, Ended, Fact, FirstToken, TransferFailed, Transferred
from preble.engines.http import HttpClient
from preble.engines.media_marks import FIRST_MARK
from preble.engines.pairs import PairedEngine
from preble.errors import EngineError, RequestError
from preble.serving.parity.answers import copy_prefix
from preble.serving.placed import LocalPlaced
from preble.serving.replicas.live import LiveReplica, LiveReplicas

if TYPE_CHECKING:
    from preble.serving.placements import Placements

LEAST_WAIT_S = 1.0
PATIENCE = 4.0
"""A copy fails after `PATIENCE` times its expected time and `LEAST_WAIT_S` more."""
MOST_BEFORE_S = 10.0
"""Where first tokens are late of late, a copy has as long as 98 of 100 of them need, but no longer than this. Else
copies would fail on an overloaded machine that come sooner than a first token."""
MOST_FAILURES = 3
"""We leave a replica out after so many copies in a row that bring nothing. A single one may fail because its source has
evicted the prefix meanwhile. Those that were under way when one failed are not counted: they may have waited for the
same connection."""


class Copies:
    """Carries out the copies of placements."""

    def __init__(self, scheduler: GlobalScheduler, replicas: LiveReplicas, placements: Placements) -> None:
        """`placements`: heard while copies are under way."""
        self._scheduler = scheduler
        self._replicas = replicas
        self._placements = placements
        self._under_way: dict[LocalPlaced, bytes | None] = {}
        """What is to be copied for these; None once somebody else has had it computed there."""

    def allow(self, replica: LiveReplica, *, allowed: bool) -> None:
        """Let a replica take part in copies, or not. Nothing happens if it has left, or copies nothing anyway."""
        replica_id = replica.engine.replica_id
        spec = replica.info.spec
        if self._replicas.get(replica_id) is replica and spec.transfer_group and spec.role is Role.MIXED:
            replica.failed_copies = 0
            self._scheduler.allow_transfers(replica_id, allowed, asyncio.get_running_loop().time())

    def sending(self) -> Counter[HttpClient]:
        """Return how many copies are under way from each server, by its client."""
        transfers = (placed.placement.transfer for placed in self._under_way)
        sources = (self._replicas.get(transfer.source) for transfer in transfers if transfer is not None)
        return Counter(source.engine.http for source in sources if source is not None)

    def on(self, placed: LocalPlaced, fact: Fact, now: float) -> None:
        """A prompt is computed, as a first token or an end shows: so may be what others there still wait for."""
        if isinstance(fact, Ended) and not fact.output_tokens:
            return
        for other, prefix in self._under_way.items():
            if (
                prefix is not None
                and placed.placement.replica_id == other.placement.replica_id
                and placed.request.namespace == other.request.namespace
                and placed.request.prompt.startswith(prefix)
            ):
                self._under_way[other] = None

    async def carry_out(self, placed: LocalPlaced) -> LocalPlaced:
        """Return the placement when its copy, if it has one, is there or has failed. A cancellation ends it."""
        transfer = placed.placement.transfer
        if transfer is None or transfer.kind is not TransferKind.COPY:  # a pair carries its transfer out itself
            return placed
        try:
            if not self._under_way:
                self._placements.listen(self, FirstToken, Ended)
            self._under_way[placed] = _copied(placed)
            await asyncio.sleep(0)  # relays begin outside of any task, in which `asyncio.timeout` is none
            placed.report(await self._copy(placed, transfer))
        except BaseException as error:
            placed.end(error)  # nobody gets it to end it
            raise
        finally:
            self._under_way.pop(placed, None)
            if not self._under_way:
                self._placements.leave(self)
        return placed

    async def _copy(self, placed: LocalPlaced, transfer: Transfer) -> Transferred | TransferFailed:
        source, target = self._replicas.get(transfer.source), self._replicas.get(placed.placement.replica_id)
        if source is None or target is None or target.engine is not placed.engine or source.engine.kv_peer is None:
            return TRANSFER_FAILED
        prefix = _prefix(placed.request, placed.placement.matched_tokens)
        salt = placed.terms.caller.cache_salt(None)
        if prefix is None or self._replicas.of_model(placed.terms.model).namespace(salt) != placed.request.namespace:
            return TRANSFER_FAILED
        engine = placed.engine.paired(source.engine) or placed.engine
        cached, kept_s, began = 0, 0.0, asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(longest_wait_s(transfer.seconds, placed.placement.predicted_ttft_p98_s)):
                cached = await copy_prefix(engine, placed.model, prefix, source.engine, salt) or 0
        except (EngineError, RequestError, TimeoutError) as error:
            reason = str(error) or "it took too long"
            if isinstance(engine, PairedEngine) and isinstance(error, EngineError):
                kept_s = engine.kept_s()
        else:
            reason = f"{cached} of {placed.placement.matched_tokens} tokens were cached then"
        missing, overtaken = placed.placement.matched_tokens - cached, self._under_way[placed] is None
        if missing <= 0 and not overtaken:
            source.failed_copies = target.failed_copies = 0
        elif missing >= transfer.tokens:
            self._failed(source, target, began, reason)
        return Transferred(overtaken) if missing <= 0 else TransferFailed(kept_s=kept_s)

    def _failed(self, source: LiveReplica, target: LiveReplica, began: float, reason: str) -> None:
        """Nothing was copied. Leave out the one of both that fails most, once that is too often: mostly the target."""
        for replica in (source, target):
            if began > replica.last_copy_failed:
                replica.failed_copies += 1
                replica.last_copy_failed = asyncio.get_running_loop().time()
        worst = max(target, source, key=lambda replica: replica.failed_copies)
        if worst.failed_copies >= MOST_FAILURES:
            self.allow(worst, allowed=False)
            hint = "restart it: a vLLM that has lost a connection to another one copies nothing any more"
            structlog.get_logger().warning(
                "copies_stopped", replica=worst.engine.replica_id, last_failure=reason, hint=hint
            )


def longest_wait_s(expected_s: float, ttft_p98_s: float | None) -> float:
    """Return after how many seconds a copy counts as failed. `ttft_p98_s`: what the request's first token will keep in
    98 of 100 cases, as the last ones turned out; None where too few did.

    >>> longest_wait_s(0.5, None), longest_wait_s(0.5, 0.8), longest_wait_s(0.5, 6.0), longest_wait_s(0.5, 60.0)
    (3.0, 3.0, 6.0, 10.0)
    """
    return max(LEAST_WAIT_S + PATIENCE * expected_s, min(ttft_p98_s or 0.0, MOST_BEFORE_S))


def _copied(placed: LocalPlaced) -> bytes:
    """Return the tokens that the replica will have once the copy is there."""
    return placed.request.prompt[: placed.placement.matched_tokens * TOKEN_BYTES]


def _prefix(request: Request, matched_tokens: int) -> PackedTokens | None:
    """Return the tokens to be copied and one more; None where some of them are no tokens of text."""
    prefix = PackedTokens(request.prompt[: (matched_tokens + 1) * TOKEN_BYTES])
    return prefix if max(unpack_tokens(prefix), default=0) < FIRST_MARK else None
