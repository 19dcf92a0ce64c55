"""A keys file that is emptied, cut off or rewritten while `preble serve` runs: only a whole file takes keys away."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.fakes import FakeReplica, replicas
from preble.engines.starting.ports import free_ports
from support.waiting import eventually


def table(name: str, key: str, more: str = "") -> str:
    return f'[{name}]\nsha256 = "{sha256(key.encode()).hexdigest()}"\n{more}'


ALICE, OP = table("alice", "alice-key"), table("op", "op-key", "admin = true\n")
NOBODY = f'[nobody]\nsha256 = "{"0" * 64}"\n'


class Gateway:
    """`preble serve` as a process. `keys`: its file of keys."""

    def __init__(self, process: asyncio.subprocess.Process, http: aiohttp.ClientSession, folder: Path) -> None:
        self.process = process
        self.keys = folder / "keys.toml"
        self._http = http
        self._log = folder / "log"

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The lines of the log about this event."""
        lines = [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    async def status(self, key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        async with self._http.post("/v1/completions", json={"prompt": "hello"}, headers=headers) as answer:
            return answer.status

    async def write(self, text: str, event: str) -> str:
        """Write the file of keys, and return the error of the next line about this event."""
        before = len(self.logged(event))
        self.keys.write_text(text)
        await eventually(lambda: len(self.logged(event)) > before)
        return str(self.logged(event)[-1].get("error"))


@asynccontextmanager
async def serve(fake: FakeReplica, folder: Path, interval_s: float, workers: int) -> AsyncIterator[Gateway]:
    [port] = free_ports(1)
    (folder / "keys.toml").write_text(ALICE + OP)
    (folder / "preble.toml").write_text(
        f'replicas = ["{fake.url}"]\nengine = "openai"\nport = {port}\nworkers = {workers}\n'
        f'[auth]\nkeys_file = "{folder / "keys.toml"}"\n[discovery]\nfile_interval_s = {interval_s}\n'
    )
    command = ["-m", "preble", "serve", "--config", str(folder / "preble.toml"), "--log-format", "json"]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=log, stderr=log)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            gateway = Gateway(process, http, folder)

            async def answers() -> bool:
                try:
                    return await gateway.status("alice-key") == 200
                except aiohttp.ClientError:
                    assert process.returncode is None, (folder / "log").read_text()
                    return False

            await eventually(answers)
            yield gateway
    finally:
        process.kill()
        await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
async def test_a_keys_file_counts_only_when_it_is_whole(tmp_path: Path, workers: int) -> None:
    async with replicas(1) as [fake], serve(fake, tmp_path, 0.1, workers) as gateway:
        assert "holds no key" in await gateway.write("", "reload_failed")
        assert await gateway.status("alice-key") == await gateway.status("op-key") == 200
        assert "is not TOML" in await gateway.write(ALICE + OP[:30], "reload_failed")
        assert await gateway.status("alice-key") == await gateway.status("op-key") == 200
        await gateway.write(OP, "reloaded")
        assert (await gateway.status("alice-key"), await gateway.status("op-key")) == (401, 200)
        await gateway.write(NOBODY, "reloaded")
        assert (await gateway.status("alice-key"), await gateway.status("op-key")) == (401, 401)
        await gateway.write(ALICE + OP, "reloaded")
        assert await gateway.status("alice-key") == await gateway.status("op-key") == 200
        assert len(gateway.logged("reload_failed")) == 2, "each is said once"


@pytest.mark.slow
async def test_a_signal_does_not_make_an_emptied_keys_file_count(tmp_path: Path) -> None:
    async with replicas(1) as [fake], serve(fake, tmp_path, 0.0, 0) as gateway:
        gateway.keys.write_text("")
        gateway.process.send_signal(signal.SIGHUP)
        await eventually(lambda: bool(gateway.logged("reload_failed")))
        assert await gateway.status("alice-key") == 200


async def test_a_gateway_does_not_start_with_an_empty_keys_file(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").touch()
    command = ["-m", "preble", "serve", "--replica", "http://127.0.0.1:9"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *command),
        stderr=asyncio.subprocess.PIPE,
        env={"PREBLE_AUTH__KEYS_FILE": str(tmp_path / "keys.toml")},
    )
    _, said = await process.communicate()
    assert process.returncode == 2 and b"holds no key" in said
