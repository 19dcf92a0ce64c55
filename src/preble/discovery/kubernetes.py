"""Members in Kubernetes: EndpointSlices of a service, pods by label, or the pods of an InferencePool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import structlog

from preble.config import DiscoveryConfig, GroupConfig
from preble.discovery.kubernetes_api import FAILURES, Api, ApiError, Gone, Listing, Objects, connect, own_namespace
from preble.discovery.member import Member
from preble.discovery.pods import ROLES, Named, UnknownRole, groups_of_pool, members_of_pods, members_of_slices
from preble.discovery.source import FIRST_WAIT_S, LONGEST_WAIT_S, Source
from preble.errors import ConfigError

_OF_SERVICE = "kubernetes.io/service-name"
_PODS = "/api/v1/namespaces/{}/pods"
_SLICES = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"
_POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"

_UNWATCHED = 2
"""How many times in a row a watch may fail soon after its list. From then on a list that succeeds no longer ends the
back-off: a cluster that lets us list but not watch would be asked for everything twice a second."""

Groups = tuple[GroupConfig, ...]


class KubernetesSource(Source):
    """Its members are the ready endpoints of a service, or the ready pods with some labels or of a pool.

    Those that are not ready or are terminating are members that are held back. When the service or pool itself is
    deleted, its members stay for a grace time: a Helm chart that is installed again, or a GitOps tool that makes the
    object anew, must not cost the whole index.
    """

    def __init__(self, name: str, group: GroupConfig, settings: DiscoveryConfig) -> None:
        super().__init__(name)
        self._group = group
        self._kubeconfig = settings.kubeconfig
        self._grace_s = settings.missing_grace_s
        self._num_unwatched = 0
        """Lists in a row after which a watch failed soon, and told nothing."""
        self._missing_since: float | None = None
        self._of_service: tuple[Member, ...] = ()
        """What the slices of the service named last."""
        self._of_pool_last: Groups = ()
        """What the pool selected last."""
        self._told: frozenset[UnknownRole] = frozenset()
        """Of the members there are, those unknown roles that are in the log."""

    async def members(self) -> AsyncIterator[tuple[Member, ...]]:
        last: tuple[Member, ...] | None = None
        loop = asyncio.get_running_loop()
        while True:
            watched_from: float | None = None
            try:
                async with (
                    connect(self._kubeconfig) as api,
                    aclosing(self._named(api)) as changes,
                    aclosing(self._within_grace(changes)) as kept,
                ):
                    async for named in kept:
                        if watched_from is None:
                            watched_from = loop.time()
                        else:
                            self._num_unwatched = 0
                        self._tell_problems(named)
                        self._tell_unknown_roles(named)
                        if named.members != last:
                            last = named.members
                            yield named.members
            except (Gone, *FAILURES) as error:
                if watched_from is not None:
                    is_short = loop.time() < watched_from + LONGEST_WAIT_S
                    self._num_unwatched = is_short * (self._num_unwatched + 1)
                await asyncio.sleep(self._wait_s(error))

    def _wait_s(self, error: Exception) -> float:
        if isinstance(error, Gone) and self._num_unwatched < _UNWATCHED:  # a version that is old is no failure
            return FIRST_WAIT_S
        wanted_s = error.retry_after_s if isinstance(error, ApiError) else 0.0
        return max(self.failed(error), min(wanted_s, LONGEST_WAIT_S))

    async def _within_grace(self, changes: AsyncGenerator[Named]) -> AsyncGenerator[Named]:
        """Pass changes on. What names the members may be missing for the grace time; then there are none."""
        loop = asyncio.get_running_loop()
        wait_s: float | None = None
        following = asyncio.ensure_future(anext(changes))
        named = Named((), ())
        try:
            while True:
                await asyncio.wait((following,), timeout=wait_s)
                if following.done():
                    named = following.result()
                    following = asyncio.ensure_future(anext(changes))
                if not named.is_missing:
                    self._missing_since = None
                elif self._missing_since is None:
                    self._missing_since = loop.time()
                since = self._missing_since
                wait_s = None if since is None else since + self._grace_s - loop.time()
                if wait_s is not None and wait_s <= 0:
                    wait_s = None
                    if named.members:
                        problems = (*named.problems, f"its replicas were kept for {self._grace_s:g} s")
                        named = named._replace(members=(), problems=problems)
                yield named
        finally:
            await _ended(following)

    def _tell_problems(self, named: Named) -> None:
        if named.is_missing and not named.members:
            self.failed(ConfigError("; ".join(named.problems)), "it names no replica")
        elif named.problems:
            self.failed(ConfigError("; ".join(named.problems)))
        elif self._num_unwatched < _UNWATCHED:
            self.worked()

    def _tell_unknown_roles(self, named: Named) -> None:
        unknown, log = frozenset(named.unknown_roles), structlog.get_logger()
        for one in sorted(unknown - self._told):
            log.warning("role_unknown", replica=one.url, label=one.label, value=one.value[:50], allowed=sorted(ROLES))
        self._told = unknown

    def _named(self, api: Api) -> AsyncGenerator[Named]:
        """Yield the members at first and after each change. Raises: Gone, and `FAILURES`."""
        if self._group.pool:
            return self._of_pool(api)
        return self._of_slices(api) if self._group.service else self._of_pods(api, (self._group,))

    async def _of_slices(self, api: Api) -> AsyncGenerator[Named]:
        slices = self._listing(_SLICES, labelSelector=f"{_OF_SERVICE}={self._group.service}")
        async for objects in api.followed(slices):
            if any(True for _ in objects):
                named = members_of_slices(objects, self._group)
                self._of_service = named.members
                yield named
            else:
                missing = f"there is no service {self._group.service!r} with EndpointSlices"
                yield Named(self._of_service, (missing,), is_missing=True)

    async def _of_pods(self, api: Api, groups: Groups) -> AsyncGenerator[Named]:
        """Yield the members of groups that have one selector."""
        async for objects in api.followed(self._listing(_PODS, labelSelector=str(groups[0].pods))):
            found = [members_of_pods(objects, group) for group in groups]
            yield Named(
                tuple(m for named in found for m in named.members),
                tuple(p for named in found for p in named.problems),
                unknown_roles=tuple(u for named in found for u in named.unknown_roles),
            )

    async def _of_pool(self, api: Api) -> AsyncGenerator[Named]:
        pool = self._listing(_POOLS, fieldSelector=f"metadata.name={self._group.pool}")
        async with aclosing(api.followed(pool)) as pools:
            groups = groups_of_pool(await anext(pools), self._group)
            while True:
                changed = asyncio.ensure_future(self._other_groups(pools, groups))
                try:
                    async with aclosing(self._of_groups(api, groups)) as pods:
                        while (named := await _next_before(changed, pods)) is not None:
                            yield named
                    groups = changed.result()
                finally:
                    await _ended(changed)

    async def _other_groups(self, pools: AsyncIterator[Objects], known: Groups) -> Groups:
        """Return the groups of the pool once they differ from those known."""
        async for objects in pools:
            if (groups := groups_of_pool(objects, self._group)) != known:
                return groups
        raise Gone

    async def _of_groups(self, api: Api, groups: Groups) -> AsyncGenerator[Named]:
        """Yield the members of the pool's groups; of a pool that is missing, those of the groups that it had last."""
        missing = f"there is no pool {self._group.pool!r} with a selector and target ports"
        self._of_pool_last = groups or self._of_pool_last
        if self._of_pool_last:
            async for named in self._of_pods(api, self._of_pool_last):
                yield named if groups else named._replace(problems=(missing,), is_missing=True)
        yield Named((), (missing,), is_missing=True)
        await asyncio.Event().wait()

    def _listing(self, path: str, **selector: str) -> Listing:
        return Listing(path.format(self._group.namespace or own_namespace()), selector)


async def _next_before(changed: asyncio.Future[Groups], pods: AsyncGenerator[Named]) -> Named | None:
    """Return what `pods` yields next, None if `changed` is done before."""
    following = asyncio.ensure_future(anext(pods))
    try:
        await asyncio.wait((changed, following), return_when=asyncio.FIRST_COMPLETED)
        return None if changed.done() else following.result()
    finally:
        await _ended(following)


async def _ended(work: asyncio.Future[Any]) -> None:
    """Cancel the work unless it has ended, and wait for its end: only then can its generator be closed."""
    work.cancel()
    await asyncio.wait((work,))
