"""The replicas that are watched: joined, held back and left as the sources of members and operators want."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import structlog

from preble import background
from preble.config import HealthConfig, ReplicaConfig
from preble.core.types import ReplicaId
from preble.discovery import Member, Source
from preble.errors import ConfigError
from preble.rules.reconciler import HoldBack, Join, Present, Remove, Replace, Step, plan
from preble.serving.placements import Placements
from preble.serving.replicas.monitor import NOT_YET, ReplicaMonitor
from preble.serving.replicas.rows import MemberRow, SourceRow
from preble.serving.replicas.wanted import UnknownReplica, WantedReplicas

_SETTLE_S = 0.25
"""How soon it is noticed that the last request on a leaving replica has ended."""


@dataclass(frozen=True, slots=True)
class _Watched:
    member: Member
    monitor: ReplicaMonitor
    task: asyncio.Task[None]


class Members:
    """Watches the wanted replicas. Use within one running event loop.

    `wanted`: change it, then call `reconcile`. `new_monitor`: for a replica; raises ConfigError if it is unusable.
    """

    def __init__(
        self, placements: Placements, new_monitor: Callable[[ReplicaConfig], ReplicaMonitor], health: HealthConfig
    ) -> None:
        self.wanted = WantedReplicas()
        self._placements = placements
        self._telemetry = placements.telemetry
        self._new_monitor = new_monitor
        self._health = health
        self._watched: dict[str, _Watched] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._sources: dict[str, tuple[Source, asyncio.Task[None]]] = {}
        self._settling: asyncio.Task[None] | None = None
        self._log = structlog.get_logger()

    # sources

    def follow(self, sources: Iterable[Source]) -> None:
        """Follow these sources from now on, and no others. What one of the same name has named stays until it looks."""
        new = {source.name: source for source in sources}
        for name in [name for name in self._sources if name not in new]:
            self._sources.pop(name)[1].cancel()
            self.wanted.forget(name)
        for name, source in new.items():
            if name in self._sources:
                self._sources[name][1].cancel()
            self._sources[name] = (source, background.keep(partial(self._take_in, source), f"members of {name}"))
        self.reconcile()

    async def _take_in(self, source: Source) -> None:
        try:
            async for members in source.members():
                usable = tuple(member for member in members if self._is_usable(source, member))
                self._log.info("members", source=source.name, replicas=len(usable))
                self.wanted.set(source.name, usable)
                self.reconcile()
        except Exception as error:
            source.failed(error)
            raise

    def _is_usable(self, source: Source, member: Member) -> bool:
        try:
            self._new_monitor(member.replica)
        except ConfigError as error:
            self._log.error("member_unusable", source=source.name, replica=member.url, error=str(error))
            return False
        return True

    def check(self, replicas: Iterable[ReplicaConfig]) -> None:
        """Raises: ConfigError: one of them cannot be watched, for example since its adapter is unknown."""
        for replica in replicas:
            self._new_monitor(replica)

    # to what is wanted

    def reconcile(self) -> None:
        """Bring what is watched to what is wanted; what has to wait for running requests follows by itself."""
        running = self._placements.running()
        present = {
            url: Present(one.member, one.monitor.held_back, is_idle=not running[one.monitor.http])
            for url, one in self._watched.items()
        }
        wanted = self.wanted.merged()
        for step in plan(wanted, present):
            self._take(step)
        if self._watched.keys() - wanted.keys() and (self._settling is None or self._settling.done()):
            self._settling = asyncio.create_task(self._settle())

    async def _settle(self) -> None:
        await asyncio.sleep(_SETTLE_S)
        self._settling = None
        self.reconcile()

    def _take(self, step: Step) -> None:
        match step:
            case Join(member):
                self._join(member)
            case Replace(member):
                self._log.info("replica_replaced", replica=member.url)
                old = self._watched[member.url]
                self._leave(member.url, lets_end=True)
                self._join(member, after=old.monitor.has_left)
            case HoldBack(url, reason):
                self._log.info("replica_held_back" if reason else "replica_released", replica=url, reason=reason)
                self._watched[url].monitor.hold_back(reason)
            case Remove(url):
                self._log.info("replica_removed", replica=url)
                self._leave(url, lets_end=True)

    def _join(self, member: Member, after: asyncio.Event | None = None) -> None:
        monitor = self._new_monitor(member.replica)
        monitor.configure(self._health)
        monitor.hold_back(member.held_back)
        self._telemetry.replica_expected(ReplicaId(member.url))
        task = asyncio.create_task(monitor.run(after))
        task.add_done_callback(lambda _: monitor.has_left.set())
        self._watched[member.url] = _Watched(member, monitor, task)

    def _leave(self, url: str, *, lets_end: bool) -> None:
        """Stop to watch a replica. `lets_end`: whether what runs there may end."""
        one = self._watched.pop(url)
        one.monitor.lets_end = lets_end
        self._leaving.add(one.task)
        one.task.add_done_callback(lambda task: self._left(task, url, one.monitor))
        one.task.cancel()

    def _left(self, task: asyncio.Task[None], url: str, monitor: ReplicaMonitor) -> None:
        """Forget a replica that is left, once the last report about its requests has come."""
        self._leaving.discard(task)
        if self._placements.running()[monitor.http]:
            asyncio.get_running_loop().call_later(_SETTLE_S, self._left, task, url, monitor)
        elif url not in self._watched:
            for replica_id in {ReplicaId(url), *monitor.replica_ids}:
                self._telemetry.forget_replica(replica_id)

    def remove(self, url: str, *, at_once: bool) -> None:
        """Leave a replica when nothing runs there any more, or at once. Raises: UnknownReplica."""
        if url not in self._watched or url in self.wanted.merged():  # else it is leaving already
            self.wanted.remove(url)
        if at_once and url in self._watched:
            self._log.info("replica_removed", replica=url, at_once=True)
            self._leave(url, lets_end=False)
        self.reconcile()

    def configure(self, health: HealthConfig) -> None:
        """Check the replicas in this way from now on."""
        self._health = health
        for one in self._watched.values():
            one.monitor.configure(health)

    # for pages

    def __iter__(self) -> Iterator[MemberRow]:
        """Yield every replica that is watched."""
        running = self._placements.running()
        for url, one in self._watched.items():
            yield self._row(url, one, running[one.monitor.http])

    @property
    def are_settled(self) -> bool:
        """Whether there are replicas, and each one has joined or could not be reached."""
        return bool(self._watched) and all(one.monitor.waits_because != NOT_YET for one in self._watched.values())

    def row(self, url: str) -> MemberRow:
        """Return a watched replica. Raises: UnknownReplica."""
        if (one := self._watched.get(url)) is None:
            raise UnknownReplica(f"there is no replica {url[:200]!r}; GET /replicas lists those there are", param="url")
        return self._row(url, one, self._placements.running()[one.monitor.http])

    def _row(self, url: str, one: _Watched, running: int) -> MemberRow:
        monitor = one.monitor
        if monitor.held_back is not None:
            state = "draining" if running else "drained"
        elif monitor.waits_because is None:
            state = "live"
        else:
            state = "down" if monitor.replica_ids else "joining"
        live = filter(None, map(self._placements.replicas.get, monitor.replica_ids))
        spec = next((replica.info.spec for replica in live), None)
        return MemberRow(
            url=url,
            state=state,
            source=self.wanted.source_of(url),
            held_back=monitor.held_back,
            running=running,
            safe_to_remove=state == "drained",
            last_error=monitor.waits_because,
            replicas=tuple(monitor.replica_ids),
            role=None if spec is None else spec.role,
            transfer_group=None if spec is None else spec.transfer_group,
        )

    def sources(self) -> list[SourceRow]:
        """Return every source that is followed or names a replica."""
        counts = Counter(map(self.wanted.source_of, self.wanted.merged()))
        errors = {name: source.error for name, (source, _) in self._sources.items()}
        names = dict.fromkeys([*counts, *errors])
        return [SourceRow(name, counts[name], errors.get(name)) for name in names if name is not None]

    async def close(self) -> None:
        """Leave every replica at once."""
        for url in list(self._watched):
            self._leave(url, lets_end=False)
        await background.end(*(task for _, task in self._sources.values()))
        tasks = [*self._leaving]
        if self._settling is not None:
            tasks.append(self._settling)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
