"""What each step of the script does, and when it is over: conditions, never times."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from chaos.clients import ADMIN, TENANTS, Clients
from chaos.fleet import KEYS, Cluster, Replica
from chaos.replica import WELL
from chaos.script import Step
from support.waiting import eventually

BREAKING = frozenset({"kill", "stop", "cut"})
"""What may cost a client an answer that has begun."""
RAW = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"\x00" * 1000,
    b"GET /" + b"a" * 100_000,
)
"""What a client may send instead of HTTP."""
BODIES: tuple[Any, ...] = (
    {"prompt": ["a"] * 5000},
    {"prompt": "a", "max_tokens": "many"},
    {"prompt": "a", "model": "unknown"},
    {"prompt": "a", "kv_transfer_params": {}},
    {"prompt": [2**40]},
    [],
    {},
)


class Faults:
    """Does the steps of a script to a cluster under load. `hold`: requests that end while something is wrong."""

    def __init__(self, cluster: Cluster, clients: Clients, hold: int) -> None:
        self._cluster, self._clients, self._hold = cluster, clients, hold
        self._num_flooded = 0
        self.flooded: dict[str, int] = {}

    async def do(self, step: Step) -> None:
        """Return when the cluster has recovered from it."""
        replica = self._cluster.replicas[step.replica % len(self._cluster.replicas)]
        match step.kind:
            case "kill" | "stop":
                async with self._broken(replica):
                    await (self._kill(replica) if step.kind == "kill" else self._stop(replica))
                    await self.all_back()
            case "full disk":
                await self._fill_disk()
            case "reload":
                await self._reload()
            case "flood":
                await self._flood()
            case "hostile":
                await self._send_rubbish()
            case "restart":
                await self._restart()
            case way:
                await self._misbehave(replica, way)

    @asynccontextmanager
    async def _broken(self, replica: Replica) -> AsyncIterator[None]:
        """What began on the replica before or within the context, and ends within it, may be lost."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        yield
        replica.spells.append((since, loop.time()))

    # replicas

    async def _kill(self, replica: Replica) -> None:
        await replica.process.kill()
        await self.served()
        await replica.start()

    async def _stop(self, replica: Replica) -> None:
        replica.signal(signal.SIGSTOP)
        try:
            await self.served()
        finally:
            replica.signal(signal.SIGCONT)

    async def _misbehave(self, replica: Replica, way: str) -> None:
        if not replica.is_emulated:  # a real engine cannot be told to
            replica = next(other for other in self._cluster.replicas if other.is_emulated)
        async with self._broken(replica):
            await replica.do(way)
            await self.served()
            await replica.do(WELL)
            await self.all_back()
        if way not in BREAKING:
            replica.spells.pop()

    async def served(self) -> None:
        """Wait until `hold` more requests have ended."""
        until = self._clients.tally.num_ended + self._hold
        await eventually(lambda: self._clients.tally.num_ended >= until, "requests end while something is wrong")

    async def all_back(self) -> None:
        """Wait until every replica gets requests again."""
        await eventually(self._are_all_in, "every replica comes back")

    async def _are_all_in(self) -> bool:
        page = await self.page("/debug/replicas")
        standings = [one["standing"] for one in page["replicas"]]
        return standings == ["in"] * len(self._cluster.replicas)

    # the gateway

    async def _fill_disk(self) -> None:
        gateway = self._cluster.gateway
        lost_before = await self._lines_lost()
        gateway.limit_files(0)
        try:
            await self.served()
            lost = await self._lines_lost()
        finally:
            gateway.limit_files(None)
        assert all(now > before for now, before in zip(lost, lost_before, strict=True)), (
            "the disk was full, and no line was lost"
        )

    async def _lines_lost(self) -> tuple[float, float]:
        """Of the log and of the decision log."""
        metrics = await self.metrics()
        return metrics["preble_log_lines_lost"], metrics["preble_decision_log_dropped_total"]

    async def _reload(self) -> None:
        """Good keys, then a broken file, then the first again; nobody's key stops working."""
        for keys, broken in (({**KEYS, "dave": "key-of-dave"}, False), (KEYS, True), (KEYS, False)):
            self._cluster.write_keys(keys, broken=broken)
            self._cluster.gateway.process.send_signal(signal.SIGHUP)
            expected = 200 if "dave" in keys or broken else 401
            await eventually(partial(self._dave_gets, expected), "the keys are read again")
        await self.served()

    async def _dave_gets(self, status: int) -> bool:
        headers = {"x-api-key": "key-of-dave"}
        async with aiohttp.ClientSession(self._cluster.url, headers=headers) as http, http.get("/v1/models") as reply:
            return reply.status == status

    async def _flood(self) -> None:
        """Many times what one tenant may send, at once."""
        count = 4 * self._hold
        ends = await self._clients.flood(count, self._num_flooded)
        self._num_flooded += count
        for end, number in ends.items():
            self.flooded[end] = self.flooded.get(end, 0) + number
        assert set(ends) <= {"ok", "left", "refused", "lost"}, ends

    async def _send_rubbish(self) -> None:
        at = urlsplit(self._cluster.url)
        for data in RAW:
            await asyncio.to_thread(_send_raw, at.hostname or "", at.port or 0, data)
        http = self._clients.session(TENANTS[0])
        for body in BODIES:
            async with http.post("/v1/completions", json=body) as reply:
                assert 400 <= reply.status < 500, (body, reply.status, await reply.text())

    async def _restart(self) -> None:
        """A new gateway takes the socket over, then the old one drains and ends."""
        old = self._cluster.gateway
        self._cluster.gateway = await self._cluster.new_gateway()
        old.end()
        self._clients.renew()
        await old.ended()
        await self.all_back()

    # what the gateway says

    async def page(self, path: str) -> Any:
        """Of the gateway, over a connection of its own, as the admin."""
        headers = {"x-api-key": KEYS[ADMIN], "connection": "close"}
        async with aiohttp.ClientSession(self._cluster.url, headers=headers) as http, http.get(path) as reply:
            raw = await reply.read()
            assert reply.status == 200, (path, reply.status, raw)
        return raw.decode() if path == "/metrics" else msgspec.json.decode(raw)

    async def metrics(self) -> Mapping[str, float]:
        """The sums over all labels, by name."""
        sums: dict[str, float] = {}
        for line in (await self.page("/metrics")).splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums


def _send_raw(host: str, port: int, data: bytes) -> None:
    with socket.create_connection((host, port), timeout=60.0) as peer:
        try:
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(65536):
                pass
        except ConnectionError:
            pass  # refused without being read
