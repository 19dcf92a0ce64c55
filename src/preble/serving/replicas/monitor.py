"""One task for each replica: wait until it is up, add it to the rotation, watch it, and remove it when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from math import inf

import structlog

from preble import background
from preble.background import Backoff
from preble.config import HealthConfig
from preble.core.types import ReplicaId
from preble.engines import Engine, EngineServer, Found
from preble.engines.http import HttpClient
from preble.errors import EngineError, EngineRefused
from preble.serving.parity.watch import ParityWatch
from preble.serving.replicas.live import LiveReplica
from preble.serving.replicas.rotation import Rotation

NOT_YET = "it has not answered yet"
"""Why a replica that has not been asked is not in the rotation."""
_IDLE_CHECK_S = 0.1


@dataclass(frozen=True, slots=True)
class Down:
    """Why a replica is down, None if it is not. `silent_since`: when its machine fell silent.

    `found_anew`: what a replica is that answers, but is not what it was when it joined.
    """

    reason: str | None
    silent_since: float | None = None
    found_anew: Found | None = None


class ReplicaMonitor:
    """Keeps one replica's place in the rotation true. Owns the connections to its server."""

    def __init__(self, server: EngineServer, rotation: Rotation, health: HealthConfig, parity: ParityWatch) -> None:
        self._server = server
        self._rotation = rotation
        self._health = health
        self._parity = parity
        self._log = structlog.get_logger().bind(replica=server.replica_id)
        self._live: list[LiveReplica] = []
        self.waits_because: str | None = NOT_YET
        """Why the replica is not in the rotation; None while it is."""
        self.held_back: str | None = None
        """Why it gets no new requests; None if it gets some while it is up."""
        self.replica_ids: dict[ReplicaId, None] = {}
        """The ids with which it has been in the rotation, one for each data-parallel rank; empty if never."""
        self.lets_end = False
        """Whether requests that run there when this is cancelled may end."""
        self.has_left = asyncio.Event()
        """Set when it is out of the rotation for good."""

    @property
    def http(self) -> HttpClient:
        """The client of the server."""
        return self._server.http

    def configure(self, health: HealthConfig) -> None:
        """Check in this way from now on."""
        self._health = health

    def hold_back(self, reason: str | None) -> None:
        """Give the replica no new requests for this reason, also when it comes back; None: give it some again."""
        self.held_back = reason
        for replica in self._live:
            self._rotation.hold_back(replica.engine.replica_id, held_back=reason is not None)

    async def run(self, after: asyncio.Event | None = None) -> None:
        """Watch over the replica until cancelled; then it is out of the rotation and its connections are closed.

        `after`: begin only when this is set: another monitor of the same address has left.
        """
        try:
            if after is not None:
                await after.wait()
            await background.run(self._lives, f"monitor of {self._server.replica_id}")
        finally:
            self.has_left.set()
            try:
                if self.lets_end:
                    await self._until_idle()
            finally:
                await self._server.close()

    async def _until_idle(self) -> None:
        while self._rotation.runs_at(self.http):  # noqa: ASYNC110 (no event says that the last request has ended)
            await asyncio.sleep(_IDLE_CHECK_S)

    async def _lives(self) -> None:
        while True:
            await self._one_life()

    async def _one_life(self) -> None:
        """Watch the replica from its first successful probe to its failure."""
        try:
            self._join(await self._until_up())
            while replicas := self._live:
                async with asyncio.TaskGroup() as aside:
                    parity = [aside.create_task(self._parity.watch(replica)) for replica in replicas]
                    try:
                        await self._until_removed(replicas)
                    finally:
                        # Cancelled only now: a check that waits for a dead replica must not keep it in the rotation.
                        for task in parity:
                            task.cancel()
        finally:
            self._leave(Down(None))  # whatever happened, also while it was about to begin anew

    def _join(self, found: Found) -> None:
        """Add all the server's ranks to the rotation, or none."""
        suspect = asyncio.Event()
        replicas: list[LiveReplica] = []
        try:
            for rank in found.ranks:
                replica = self._rotation.add(rank.engine, rank.info, suspect)
                replicas.append(replica)
        except Exception as error:
            self.waits_because = f"it could not join: {error}"
            self._remove(replicas, Down(self.waits_because))
            raise
        self._found = found
        self.waits_because = None
        self._live = replicas
        self.replica_ids = dict.fromkeys(replica.engine.replica_id for replica in replicas)
        self.hold_back(self.held_back)

    def _leave(self, down: Down) -> None:
        """Remove all the server's ranks from the rotation. Nothing happens if they are not in it."""
        replicas, self._live = self._live, []
        if replicas:
            self.waits_because = down.reason
        self._remove(replicas, down)

    def _remove(self, replicas: Sequence[LiveReplica], down: Down) -> None:
        """Raises: what the removal of one raises, after the others are removed too."""
        with ExitStack() as removals:
            for one in reversed(replicas):
                remove = self._rotation.remove
                removals.callback(remove, one.engine.replica_id, down.reason, silent_since=down.silent_since)

    async def _until_removed(self, replicas: list[LiveReplica]) -> None:
        """Follow what its ranks report until it fails, then remove them. What is found anew joins in the same turn.

        So no request finds the rotation without it, which may be its only replica.
        """
        down = Down(None)
        try:
            async with asyncio.TaskGroup() as group:
                take = self._rotation.apply
                following = [group.create_task(replica.engine.follow_kv_events(take)) for replica in replicas]
                following += [group.create_task(self._take_in_loads(replica)) for replica in replicas]
                down = await self._until_down(replicas)
                for task in following:
                    task.cancel()
        finally:
            self._leave(down)
        if down.found_anew is not None:
            self._join(down.found_anew)

    async def _until_up(self) -> Found:
        """Probe, ever less often, until the replica answers. Each new reason is logged."""
        backoff = Backoff(self._health.retry_min_s, self._health.retry_max_s)
        logged: str | None = None
        while True:
            try:
                async with asyncio.timeout(self._health.check_timeout_s):
                    return await self._server.probe()
            except (EngineError, TimeoutError) as error:
                self.waits_because = reason = _reason(error)
                if reason != logged:
                    self._log.warning("replica_waited_for", error=reason)
                    logged = reason
            await backoff.pause()

    async def _take_in_loads(self, replica: LiveReplica) -> None:
        loads = replica.engine.loads()
        if loads is not None:
            async for load in loads:
                replica.engine_load = load

    async def _until_down(self, replicas: list[LiveReplica]) -> Down:
        """Check now and then, and at once when it is suspected. Returns why the replica counts as down."""
        failures = 0
        in_doubt, asked_at = False, -inf
        while True:
            suspected = await self._pause(replicas[0].suspect, self._health.check_interval_s if failures == 0 else 0.0)
            checked_at = asyncio.get_running_loop().time()
            error = await self._check(self._found.engine)
            in_doubt |= suspected
            if error is None:
                # Not at each 404: a probe takes several requests, and clients may repeat a wrong name for long.
                is_time = in_doubt and checked_at >= asked_at + self._health.check_interval_s
                if is_time:
                    in_doubt, asked_at = False, checked_at
                is_another = not await self._took_in_models(replicas)
                found_anew = await self._found_anew() if is_time or is_another else None
                if is_another or found_anew is not None:
                    reason = "it is not what it was when it joined: it has restarted, or serves something else"
                    return Down(reason, found_anew=found_anew)
                failures = 0
                continue
            if failures == 0:
                failing_since = checked_at
            failures += 1
            # Nothing listens, and a request has just found the same: no further checks are needed.
            if failures >= self._health.failures or (suspected and isinstance(error, EngineRefused)):
                return Down(_reason(error), failing_since if _is_silent(error) else None)
            await asyncio.sleep(self._health.retry_min_s)

    async def _pause(self, suspect: asyncio.Event, seconds: float) -> bool:
        """Wait until the time is over or the replica is suspected; return whether it is."""
        if not suspect.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await suspect.wait()
        suspected = suspect.is_set()
        suspect.clear()
        return suspected

    async def _took_in_models(self, replicas: list[LiveReplica]) -> bool:
        """Take in what it serves now, since adapters come and go. False if its base model is another one."""
        info = self._found.info
        try:
            async with asyncio.timeout(self._health.check_timeout_s):
                names = await self._found.engine.models()
        except (EngineError, TimeoutError):
            return True  # the next check will find it
        if names is None or names == (info.models, info.adapters, info.roots):
            return True
        if names.models[0] != info.models[0] or names.roots[:1] != info.roots[:1]:
            return False
        self._found = replace(self._found, info=replace(info, **names._asdict()))
        for replica in replicas:
            self._rotation.set_models(replica, names)
        return True

    async def _found_anew(self) -> Found | None:
        """Return what it is if that is not what it was when it joined, else None: checks can miss a restart."""
        try:
            async with asyncio.timeout(self._health.check_timeout_s):
                found = await self._server.probe()
        except (EngineError, TimeoutError):
            return None  # whatever it is, the checks will find it
        return found if found != self._found else None

    async def _check(self, engine: Engine) -> EngineError | TimeoutError | None:
        try:
            async with asyncio.timeout(self._health.check_timeout_s):
                await engine.check_ready()
        except (EngineError, TimeoutError) as error:
            return error
        return None


def _is_silent(error: EngineError | TimeoutError) -> bool:
    return isinstance(error, TimeoutError) or error.is_silent


def _reason(error: BaseException) -> str:
    return str(error) or "it did not answer in time"
