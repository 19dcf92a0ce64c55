"""The actor through which the processes of one deployment reach each other: routers their peers, replicas the routers.

Every process with a handle has a router: ingress replicas, but also proxies and drivers, which no broadcast to a
deployment reaches. So all of them ask one named actor, each with one call that waits for news. It forgets nothing that
matters: what is lost with it, the routers find out from each other's beats (`preble.peers`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from preble import background

logger = logging.getLogger("ray.serve.preble")

NAMESPACE = "serve"
VERSION = 5
"""Of the hub's calls and of the reports of replicas. Processes of another version have another hub; see `hub_name`."""
MOST_WAITING = 10_000
"""Packets for one listener; the oldest go first."""
LONGEST_WAIT_S = 10.0
FORGOTTEN_S = 30.0
COLLECT_S = 0.01
"""What comes within it shares one call: each costs about a millisecond of CPU time. Peers may hear of placements 50 ms
late without harm (docs/concepts/scale.md)."""
_RETRY_S = 0.5
GOSSIP, REPORT = 0, 1
"""Kinds of packets: between routers, and from replicas to all of them."""


class Hub:
    """Passes each packet on to every listener but its sender. An asyncio actor."""

    def __init__(self) -> None:
        self._boxes: dict[str, _Box] = {}

    async def publish(self, sender: str, kind: int, packet: bytes) -> None:
        """Return at once."""
        for name, box in list(self._boxes.items()):
            if name != sender:
                box.put((kind, packet))
            if not box.is_used():
                del self._boxes[name]

    async def listen(self, name: str, wait_s: float) -> list[tuple[int, bytes]]:
        """Return what has come for this listener since its last call, or wait until something comes."""
        box = self._boxes.setdefault(name, _Box())
        return await box.take(wait_s)


class _Box:
    """What waits for one listener."""

    def __init__(self) -> None:
        self._packets: deque[tuple[int, bytes]] = deque(maxlen=MOST_WAITING)
        self._has_some = asyncio.Event()
        self._num_takers = 0
        self._taken_at = 0.0

    def is_used(self) -> bool:
        """Return whether somebody listens, or has a moment ago."""
        return bool(self._num_takers) or asyncio.get_running_loop().time() < self._taken_at + FORGOTTEN_S

    def put(self, packet: tuple[int, bytes]) -> None:
        self._packets.append(packet)
        self._has_some.set()

    async def take(self, wait_s: float) -> list[tuple[int, bytes]]:
        self._num_takers += 1
        try:
            async with asyncio.timeout(wait_s):
                await self._has_some.wait()
            await asyncio.sleep(COLLECT_S)
        except TimeoutError:
            pass
        finally:
            self._num_takers -= 1
            self._taken_at = asyncio.get_running_loop().time()
        self._has_some.clear()
        taken = list(self._packets)
        self._packets.clear()
        return taken


def hub_name(deployment: str) -> str:
    """Return the name of a deployment's hub. `deployment`: its id, with the application."""
    return f"preble-hub:{VERSION}:{deployment}"


def find_hub(deployment: str) -> Any:
    """Return the deployment's hub. Raises: ValueError: there is none."""
    return ray.get_actor(hub_name(deployment), namespace=NAMESPACE)


def _join_hub(deployment: str) -> Any:
    """Return the deployment's hub. The first to ask makes it, and it ends with that process; then another makes one."""
    options = {"name": hub_name(deployment), "namespace": NAMESPACE, "get_if_exists": True}
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=1000)(Hub)
    return actor.options(**options).remote()


class HubBus:
    """The bus (`preble.serving.NewBus`) of the routers of one deployment. Use within one running event loop."""

    def __init__(
        self,
        deployment: str,
        on_report: Callable[[bytes], None],
        name: str,
        on_packet: Callable[[bytes], None],
        on_change: Callable[[bool], None],
    ) -> None:
        """`on_report`: called with each packet of a replica."""
        self.is_connected = False
        self._deployment = deployment
        self._name = name
        self._on_change = on_change
        self._takers = {GOSSIP: on_packet, REPORT: on_report}
        self._hub: Any = None
        self._listening = background.keep(self._listen, "hub")

    async def publish(self, packet: bytes) -> None:
        if not self.is_connected:
            return
        try:
            await self._hub.publish.remote(self._name, GOSSIP, packet)
        except RayError:
            self._changed(False)

    async def close(self) -> None:
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)

    async def _listen(self) -> None:
        while True:
            try:
                if not self.is_connected:
                    self._hub = await asyncio.to_thread(_join_hub, self._deployment)
                    await self._hub.listen.remote(self._name, 0.0)
                    self._changed(True)
                for kind, packet in await self._hub.listen.remote(self._name, LONGEST_WAIT_S):
                    self._take(kind, packet)
            except (RayError, ValueError):
                self._changed(False)
                await asyncio.sleep(_RETRY_S)

    def _take(self, kind: int, packet: bytes) -> None:
        try:
            self._takers[kind](packet)
        except Exception:
            logger.exception("Preble dropped a packet of %d bytes", len(packet))

    def _changed(self, is_connected: bool) -> None:
        if is_connected != self.is_connected:
            self.is_connected = is_connected
            self._on_change(is_connected)
