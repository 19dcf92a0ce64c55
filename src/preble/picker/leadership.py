"""Which of several pickers is asked: the holder of a Kubernetes Lease."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import structlog

from preble import background
from preble.config import GatewayConfig
from preble.discovery.kubernetes_api import CONFLICT, FAILURES, NOT_FOUND, Api, ApiError, connect, own_namespace

_GIVE_BACK_S = 5.0
"""How long the end of a picker may take to give its lease back."""

_LATE = "the Kubernetes API does not answer in time"


class Timing(NamedTuple):
    """Whole seconds, as a Lease counts: how long one lasts that nobody renews, and between two looks at it."""

    lease_s: int = 15
    look_s: int = 2


TIMING = Timing()


class Leadership:
    """Takes a lease when it is free, and keeps it. `is_leader`: whether gateways are to ask this process.

    Theory of operation. As Kubernetes' own components do (client-go's `leaderelection`), each picker looks at the lease
    again and again. The holder renews it. Another one takes it once it has not changed for as long as it lasts, by this
    process's own clock: clocks of different machines are never compared. A write names the version that was read, so
    that of two who write at once one is refused (409).

    Unlike those components, a holder that cannot reach the API stays leader until it reads that another one holds the
    lease (docs/decisions/0009).
    """

    def __init__(self, config: GatewayConfig, timing: Timing = TIMING) -> None:
        self.identity = f"{socket.gethostname()}_{os.getpid()}"
        self.is_leader = False
        self._lease = str(config.picker.lease)
        namespace = config.picker.namespace or own_namespace()
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._kubeconfig = config.discovery.kubeconfig
        self._timing = timing
        self._seen: Mapping[str, Any] = {}
        self._seen_at = 0.0
        self._error: str | None = None
        self._log = structlog.get_logger().bind(lease=self._lease)

    async def run(self) -> None:
        """Follow the lease until cancelled; then give it back if it is held, so that another can take it at once."""
        try:
            while True:
                try:
                    async with connect(self._kubeconfig) as api:
                        await self._follow(api)
                except FAILURES as error:
                    self._unknown(error)
                await asyncio.sleep(self._timing.look_s)
        finally:
            await self._give_back()

    async def _follow(self, api: Api) -> None:
        while True:
            async with asyncio.timeout(self._timing.lease_s):
                await self._look(api)
            if self._error is not None:
                self._error = None
                self._log.info("lease_known_again", leads=self.is_leader)
            await asyncio.sleep(self._timing.look_s)

    async def _look(self, api: Api) -> None:
        """Read the lease; renew it if it is ours, take it if it is free. Raises: `FAILURES`."""
        try:
            lease = await api.ask("GET", f"{self._leases}/{self._lease}")
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            lease = None
        spec = (lease or {}).get("spec") or {}
        now = asyncio.get_running_loop().time()
        if spec != self._seen:
            self._seen, self._seen_at = spec, now
        holder = spec.get("holderIdentity") or None
        expires_at = self._seen_at + (spec.get("leaseDurationSeconds") or self._timing.lease_s)
        if holder in (None, self.identity) or now >= expires_at:
            await self._write(api, lease, self._taken(spec))
        else:
            self._leads(False)

    def _taken(self, spec: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of a lease that we hold from now on, or still."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_ours = spec.get("holderIdentity") == self.identity
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": self._timing.lease_s,
            "acquireTime": spec.get("acquireTime", now) if is_ours else now,
            "renewTime": now,
            "leaseTransitions": spec.get("leaseTransitions", 0) + (not is_ours and bool(spec)),
        }

    async def _write(self, api: Api, lease: Mapping[str, Any] | None, spec: Mapping[str, Any]) -> None:
        """Create or replace the lease. If somebody else was quicker, the next look says what that means."""
        try:
            if lease is None:
                head = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._lease}}
                await api.ask("POST", self._leases, {**head, "spec": spec})
            else:
                kept = {**(lease.get("spec") or {}), **spec}
                await api.ask("PUT", f"{self._leases}/{self._lease}", {**lease, "spec": kept})
        except ApiError as error:
            if error.status != CONFLICT:
                raise
        else:
            self._leads(True)

    def _leads(self, leads: bool) -> None:
        if leads and not self.is_leader:
            self._log.info("leading", identity=self.identity)
        elif self.is_leader and not leads:
            self._log.warning("lease_lost", consequence="gateways ask another picker")
        self.is_leader = leads

    def _unknown(self, error: BaseException) -> None:
        """Note that the lease cannot be looked at; each new reason is logged once."""
        reason = str(error) or _LATE
        if reason != self._error:
            self._error = reason
            consequence = "this picker goes on leading" if self.is_leader else "this picker waits"
            self._log.warning("lease_unknown", error=reason, consequence=consequence)

    async def _give_back(self) -> None:
        if not self.is_leader:
            return
        self.is_leader = False
        try:
            async with background.time_limit(_GIVE_BACK_S), connect(self._kubeconfig) as api:
                lease = await api.ask("GET", f"{self._leases}/{self._lease}")
                if lease["spec"].get("holderIdentity") == self.identity:
                    spec = {name: value for name, value in lease["spec"].items() if name != "holderIdentity"}
                    await api.ask("PUT", f"{self._leases}/{self._lease}", {**lease, "spec": spec})
        except FAILURES as error:
            consequence = f"another picker leads only {self._timing.lease_s} s later"
            self._log.warning("lease_kept", error=str(error) or _LATE, consequence=consequence)
