"""Members in Kubernetes: EndpointSlices of a service, pods by label, or the pods of an InferencePool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

from kubernetes_asyncio.client import ApiClient, CoreV1Api, CustomObjectsApi, DiscoveryV1Api

from preble.config import DiscoveryConfig, GroupConfig
from preble.discovery.kubernetes_api import FAILURES, Gone, Listing, Objects, connect, followed, own_namespace, plain
from preble.discovery.member import Member
from preble.discovery.pods import Named, groups_of_pool, members_of_pods, members_of_slices
from preble.discovery.source import FIRST_WAIT_S, Source
from preble.errors import ConfigError

_OF_SERVICE = "kubernetes.io/service-name"
_POOLS = ("inference.networking.k8s.io", "v1")

Groups = tuple[GroupConfig, ...]


class KubernetesSource(Source):
    """Its members are the ready endpoints of a service, or the ready pods with some labels or of a pool.

    Those that are not ready or are terminating are members that are held back.
    """

    def __init__(self, name: str, group: GroupConfig, settings: DiscoveryConfig) -> None:
        super().__init__(name)
        self._group = group
        self._kubeconfig = settings.kubeconfig

    async def members(self) -> AsyncIterator[tuple[Member, ...]]:
        last: tuple[Member, ...] | None = None
        while True:
            try:
                async with await connect(self._kubeconfig) as api, aclosing(self._named(api)) as changes:
                    async for named in changes:
                        self._tell_problems(named)
                        if named.members != last:
                            last = named.members
                            yield named.members
            except Gone:
                await asyncio.sleep(FIRST_WAIT_S)
            except FAILURES as error:
                await asyncio.sleep(self.failed(plain(error)))

    def _tell_problems(self, named: Named) -> None:
        if named.problems:
            self.failed(ConfigError("; ".join(named.problems)))
        else:
            self.worked()

    def _named(self, api: ApiClient) -> AsyncGenerator[Named]:
        """Yield the members at first and after each change. Raises: Gone, and `FAILURES`."""
        if self._group.pool:
            return self._of_pool(api)
        return self._of_slices(api) if self._group.service else self._of_pods(api, (self._group,))

    async def _of_slices(self, api: ApiClient) -> AsyncGenerator[Named]:
        slices = DiscoveryV1Api(api).list_namespaced_endpoint_slice
        selector = f"{_OF_SERVICE}={self._group.service}"
        async for objects in followed(self._listing(slices, label_selector=selector)):
            yield members_of_slices(objects, self._group)

    async def _of_pods(self, api: ApiClient, groups: Groups) -> AsyncGenerator[Named]:
        """Yield the members of groups that have one selector."""
        pods = self._listing(CoreV1Api(api).list_namespaced_pod, label_selector=str(groups[0].pods))
        async for objects in followed(pods):
            found = [members_of_pods(objects, group) for group in groups]
            yield Named(tuple(m for named in found for m in named.members), tuple(p for n in found for p in n.problems))

    async def _of_pool(self, api: ApiClient) -> AsyncGenerator[Named]:
        listing = partial(CustomObjectsApi(api).list_namespaced_custom_object, *_POOLS)
        pool = self._listing(listing, plural="inferencepools", field_selector=f"metadata.name={self._group.pool}")
        async with aclosing(followed(pool)) as pools:
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

    async def _of_groups(self, api: ApiClient, groups: Groups) -> AsyncGenerator[Named]:
        if groups:
            async for named in self._of_pods(api, groups):
                yield named
        yield Named((), (f"there is no pool {self._group.pool!r} with a selector and target ports",))
        await asyncio.Event().wait()

    def _listing(self, call: Any, **selector: str) -> Listing:
        return partial(call, namespace=self._group.namespace or own_namespace(), **selector)


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
