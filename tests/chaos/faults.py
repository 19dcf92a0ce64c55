"""What each step of the script does, and when it is over: conditions, never times."""

from __future__ import annotations

import asyncio
import os
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
            case "guest":
                await self._have_a_guest()
            case "upgrade":
                await self._upgrade(self._emulated(replica))
            case way:
                await self._misbehave(self._emulated(replica), way)

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
        async with self._broken(replica):
            await replica.do(way)
            await self.served()
            await replica.do(WELL)
            await self.all_back()
        if way not in BREAKING:
            replica.spells.pop()

    def _emulated(self, replica: Replica) -> Replica:
        """A replica that can be told to do badly, and starts in seconds."""
        return replica if replica.is_emulated else self._cluster.replicas[0]

    async def _upgrade(self, replica: Replica) -> None:
        """Drain, stop and start a replica, as an operator does: that costs no answer at all."""
        await self._ask("POST", f"/replicas/drain?url={replica.url}")
        await eventually(partial(self._has, replica, safe_to_remove=True), "nothing runs on the drained replica")
        await replica.process.stop()
        await self.served()
        await replica.start()
        await self._ask("POST", f"/replicas/undrain?url={replica.url}")
        await self.all_back()

    async def _have_a_guest(self) -> None:
        """Add a replica by hand, and remove it again."""
        guest = self._cluster.guest
        await guest.start()
        await self._ask("POST", "/replicas", {"url": guest.url})
        await eventually(partial(self._has, guest, state="live"), "the replica that was added is up")
        await self.served()
        await self._ask("DELETE", f"/replicas?url={guest.url}")
        await eventually(partial(self._has_gone, guest), "the replica that was removed is gone")
        await guest.process.stop()

    async def _has(self, replica: Replica, **fields: object) -> bool:
        rows = {row["url"]: row for row in (await self._ask("GET", "/replicas"))["replicas"]}
        return all(rows[replica.url][name] == value for name, value in fields.items())

    async def _has_gone(self, replica: Replica) -> bool:
        return all(row["url"] != replica.url for row in (await self._ask("GET", "/replicas"))["replicas"])

    async def served(self) -> None:
        """Wait until `hold` more requests have ended."""
        until = self._clients.tally.num_ended + self._hold
        await eventually(lambda: self._clients.tally.num_ended >= until, "requests end while something is wrong")

    async def all_back(self) -> None:
        """Wait until every replica gets requests again."""
        await eventually(self._are_all_in, "every replica comes back")

    async def _are_all_in(self) -> bool:
        page = await self._ask("GET", "/debug/replicas")
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
            os.truncate(self._cluster.log, 0)  # as an operator makes room, and so that long runs need little
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

    async def _ask(self, method: str, path: str, body: object = None) -> Any:
        """Ask the gateway over a connection of its own, as the admin."""
        headers = {"x-api-key": KEYS[ADMIN], "connection": "close"}
        session = aiohttp.ClientSession(self._cluster.url, headers=headers)
        async with session as http, http.request(method, path, json=body) as reply:
            raw = await reply.read()
        assert reply.status < 300, (method, path, reply.status, raw)
        return raw.decode() if path == "/metrics" else msgspec.json.decode(raw)

    async def metrics(self) -> Mapping[str, float]:
        """The sums over all labels, by name."""
        sums: dict[str, float] = {}
        for line in (await self._ask("GET", "/metrics")).splitlines():
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
