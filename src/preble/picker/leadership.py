"""Which of several pickers is asked: the holder of a Kubernetes Lease."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, NamedTuple

import aiohttp
import structlog
from kubernetes_asyncio.client import ApiClient, ApiException
from kubernetes_asyncio.config import ConfigException
from kubernetes_asyncio.leaderelection.electionconfig import Config
from kubernetes_asyncio.leaderelection.leaderelection import LeaderElection
from kubernetes_asyncio.leaderelection.resourcelock.leaselock import LeaseLock

from preble.config import GatewayConfig
from preble.discovery.kubernetes_api import connect, own_namespace, plain

_UNREACHABLE = (aiohttp.ClientError, OSError, TimeoutError)


class Timing(NamedTuple):
    """Seconds: how long a lease lasts, when a holder that cannot renew it steps down, and between two tries."""

    lease_s: float = 15.0
    renew_s: float = 10.0
    retry_s: float = 2.0


TIMING = Timing()


class Leadership:
    """Takes a lease when it is free, and keeps it. `is_leader`: whether this process holds it."""

    def __init__(self, config: GatewayConfig, timing: Timing = TIMING) -> None:
        self.identity = f"{socket.gethostname()}_{os.getpid()}"
        self.is_leader = False
        self._lease = str(config.picker.lease)
        self._namespace = config.picker.namespace or own_namespace()
        self._kubeconfig = config.discovery.kubeconfig
        self._timing = timing
        self._log = structlog.get_logger()

    async def run(self) -> None:
        """Follow the lease until cancelled; then give it back if it is held, so that another can take it at once."""
        while True:
            try:
                async with await connect(self._kubeconfig) as api:
                    lock = _Lock(self._lease, self._namespace, self.identity, api)
                    try:
                        await LeaderElection(self._election(lock)).run()
                    finally:
                        await self._step_down(lock)
            except (*_UNREACHABLE, ApiException, ConfigException) as error:
                self._log.warning("lease_unknown", lease=self._lease, error=str(plain(error))[:200])
            await asyncio.sleep(self._timing.retry_s)

    def _election(self, lock: LeaseLock) -> Config:
        return Config(lock, *self._timing, onstarted_leading=self._lead, onstopped_leading=self._stop)

    async def _lead(self) -> None:
        self.is_leader = True
        self._log.info("leading", lease=self._lease, identity=self.identity)

    async def _stop(self) -> None:
        self.is_leader = False
        self._log.warning("lease_lost", lease=self._lease, consequence="gateways ask another picker")

    async def _step_down(self, lock: LeaseLock) -> None:
        was_leader, self.is_leader = self.is_leader, False
        if not was_leader:
            return
        leases = lock.api_instance
        lease = await leases.read_namespaced_lease(self._lease, self._namespace)
        if lease.spec.holder_identity == self.identity:
            version = {"resourceVersion": lease.metadata.resource_version}  # release our own lease only
            given_back = {"metadata": version, "spec": {"holderIdentity": None}}
            await leases.patch_namespaced_lease(self._lease, self._namespace, given_back)


class _Lock(LeaseLock):
    """A lease whose API may be unreachable for a while: then there is no answer, and we try again."""

    def __init__(self, name: str, namespace: str, identity: str, api: ApiClient) -> None:
        super().__init__(name, namespace, identity, api)

    async def get(self, name: str, namespace: str) -> Any:
        try:
            return await super().get(name, namespace)
        except _UNREACHABLE as error:
            unreachable = ApiException(status=0, reason=str(error))
            unreachable.body = b'{"code": 0}'
            return False, unreachable

    async def update(self, name: str, namespace: str, updated_record: Any) -> bool:
        try:
            return bool(await super().update(name, namespace, updated_record))
        except _UNREACHABLE:
            return False
