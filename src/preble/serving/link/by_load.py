"""A front-end process places by load while the scheduler process is away, on the replicas that it last heard of."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from random import Random
from typing import Any, cast

import msgspec
import structlog

from preble.config import EjectionConfig, GatewayConfig, LimitsConfig
from preble.core.policies.baselines import LeastLoad
from preble.core.policies.view import Choice, ClusterView
from preble.core.types import Reason, ReplicaId, Request
from preble.core.types.life import Ended, Fact, Lost
from preble.decisions.recent import RecentDecisions
from preble.decisions.settings import SchedulerSettings, make_scheduler
from preble.engines import Engine, ModelNames
from preble.errors import ConfigError
from preble.profiles import load_profile
from preble.rules.callers import Caller
from preble.rules.key_limits import KeyLimits
from preble.serving.link.protocol import LinkedReplica
from preble.serving.placed import LocalPlaced
from preble.serving.placements import Dispatcher, Placements
from preble.serving.replicas.clients import client_of
from preble.serving.replicas.live import LiveReplica
from preble.serving.requests import InFlightLimit
from preble.serving.scheduler_setup import DEFAULT_PROFILE
from preble.serving.telemetry.metrics import Telemetry
from preble.serving.terms import Terms

_INDEX_BYTES = 1024 * 1024
"""Nothing reads the index; it only must not grow."""


class PlacingByLoad:
    """A small scheduler of this process, with the live replicas that the scheduler process named last.

    `limit`: this process's share, one of `share`, of the limits of prompts at once and of keys.
    """

    def __init__(
        self, config: GatewayConfig, share: int, telemetry: Telemetry, on_suspicion: Callable[[ReplicaId], None]
    ) -> None:
        self._config = config
        self._on_suspicion = on_suspicion
        self._left: list[Engine] = []
        self._closing: asyncio.Future[Any] = asyncio.gather()
        settings = SchedulerSettings(policy=_ByLoad.name, index_budget_bytes=_INDEX_BYTES)
        self._scheduler = make_scheduler(settings, load_profile(config.profile or DEFAULT_PROFILE), _ByLoad())
        recent = RecentDecisions(_ByLoad.name, 1)
        self._placements = Placements(self._scheduler, telemetry, recent, EjectionConfig(enabled=False))
        self._dispatcher = Dispatcher(self._placements, config.retries)
        self.replicas = self._placements.replicas
        self._share = share
        self._loop = asyncio.get_running_loop()
        self._key_limits = KeyLimits()
        self._placements.listen(self, Ended)
        self.limit = InFlightLimit(shared_limits(config, share), self._key_limits)

    def place(self, request: Request, terms: Terms) -> LocalPlaced:
        """Raises: NoReplicaError, PromptTooLong, UnknownModel."""
        terms = self.share_of(terms)
        placed = self._dispatcher.place(request, terms)
        self._key_limits.charge(terms.caller, request.num_prompt_tokens, placed.placed_at)
        return placed

    def on(self, placed: LocalPlaced, fact: Fact, now: float) -> None:
        """Charge the key of a placement that has ended for the answer."""
        if isinstance(fact, Ended):
            self._key_limits.charge(placed.terms.caller, fact.output_tokens or 0, now)

    def share_of(self, terms: Terms) -> Terms:
        """Return the terms with this process's share of the key's limits."""
        if self._share == 1 or terms.caller.limits is None:
            return terms
        return msgspec.structs.replace(terms, caller=_shared(terms.caller, self._share))

    def used(self, caller: Caller, num_requests: int, num_tokens: int) -> None:
        """Count what a limited key used here while the scheduler process counted: that is as it were used elsewhere."""
        self._key_limits.used_elsewhere(caller.name, num_requests, num_tokens, self._loop.time())

    def use(self, rows: Iterable[LinkedReplica]) -> None:
        """Set the table to the scheduler process's list."""
        named = {ReplicaId(row.replica_id): row for row in rows}
        for replica_id in [r for r, replica in self.replicas.items() if not _is_same(replica, named.get(r))]:
            self._remove(replica_id)
        for replica_id, row in named.items():
            if (live := self.replicas.get(replica_id)) is None:
                self._add(replica_id, row)
            elif live.info != row.info:
                self.replicas.set_models(live, ModelNames(row.info.models, row.info.adapters, row.info.roots))
            if replica_id in self.replicas:
                self.replicas.set_takes_ids(self.replicas[replica_id], row.takes_ids)
        self.replicas.hold_back(frozenset(r for r, row in named.items() if row.held_back and r in self.replicas))

    def _add(self, replica_id: ReplicaId, row: LinkedReplica) -> None:
        try:
            engine = client_of(self._config, replica_id, row.url, row.adapter, row.rank)
        except ConfigError as error:
            structlog.get_logger().error("replica_unusable", replica=replica_id, error=str(error))
            return
        engine.model_path, engine.kv_peer, engine.num_ranks = row.model_path, row.kv_peer, row.num_ranks
        now = asyncio.get_running_loop().time()
        self._scheduler.add_replica(row.info.spec, now)
        self.replicas.add(LiveReplica(engine, row.info, suspect=_Suspicion(replica_id, self._on_suspicion)))
        self._placements.ejection.add(replica_id, row.info.models)

    def _remove(self, replica_id: ReplicaId) -> None:
        engine = self.replicas[replica_id].engine
        orphans = self._scheduler.remove_replica(replica_id, asyncio.get_running_loop().time())
        try:
            self._placements.lose(replica_id, orphans, Lost("it has left"))
        finally:
            self.replicas.remove(replica_id)
            self._placements.ejection.remove(replica_id)
            self._left.append(engine)
            # Requests that run there may still end well.
            asyncio.get_running_loop().call_later(self._config.timeouts.total_s, self._close_oldest)

    def _close_oldest(self) -> None:
        if self._left:
            self._closing = asyncio.gather(self._closing, self._left.pop(0).close(), return_exceptions=True)

    async def close(self) -> None:
        """Close the clients of all replicas."""
        self._placements.timer.close()
        engines = [*self._left, *(replica.engine for replica in self.replicas.values())]
        self._left.clear()
        await asyncio.gather(self._closing, *(engine.close() for engine in engines), return_exceptions=True)


class _ByLoad(LeastLoad):
    name = "by_load"

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        choice = super().choose(view, rng)
        choice.reason = Reason.SCHEDULER_AWAY
        return choice


class _Suspicion(asyncio.Event):
    """The event that is set to suspect a replica: the scheduler process then checks it."""

    def __init__(self, replica_id: ReplicaId, on_suspicion: Callable[[ReplicaId], None]) -> None:
        super().__init__()
        self._told = partial(on_suspicion, replica_id)

    def set(self) -> None:
        self._told()


def shared_limits(config: GatewayConfig, share: int) -> LimitsConfig:
    """Return the limits of one of `share` processes."""
    limits: Any = msgspec.structs.replace(config.limits, max_in_flight=max(1, config.limits.max_in_flight // share))
    return cast(LimitsConfig, limits)


@lru_cache(1024)
def _shared(caller: Caller, share: int) -> Caller:
    limits: Any = caller.limits
    given = {name: getattr(limits, name) for name in ("requests_per_minute", "tokens_per_minute", "prompts_at_once")}
    own: Any = {name: max(1, limit // share) for name, limit in given.items() if limit is not None}
    return dataclasses.replace(caller, limits=msgspec.structs.replace(limits, **own))


def _is_same(replica: LiveReplica, row: LinkedReplica | None) -> bool:
    """Return whether it is still the same replica, perhaps with other model names."""
    if row is None:
        return False
    engine = replica.engine
    known = (engine.url, engine.adapter, engine.rank, engine.model_path, engine.kv_peer, replica.info.spec)
    return known == (row.url, row.adapter, row.rank, row.model_path, row.kv_peer, row.info.spec)
