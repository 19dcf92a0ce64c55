"""The processes: replicas that can be told to do badly, real vLLM, and gateways that take a socket over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path
from types import TracebackType

import aiohttp

from chaos.clients import ADMIN, FLOOD, TENANTS
from chaos.replica import MODEL
from preble.engines.starting.commands import Command, LaunchOptions
from preble.engines.starting.launch import Fleet, ReplicaProcess
from preble.engines.starting.ports import free_ports
from support.processes import tree
from support.waiting import PATIENCE_S

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
VLLM = ROOT / ".engines" / "vllm" / "bin" / "vllm"
TINY_MODEL = ROOT / ".engines" / "models" / "tiny-llama"
READY_S = 600.0
KEYS = {name: f"key-of-{name}" for name in (*TENANTS, FLOOD, ADMIN)}
DRAIN_S = 3.0
ON_GIVEN_SOCKET = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def vllm_is_here() -> bool:
    return VLLM.is_file() and TINY_MODEL.is_dir()


class Replica:
    """One replica process. `name`: its fingerprint in answers."""

    def __init__(self, process: ReplicaProcess, name: str, *, is_emulated: bool) -> None:
        self.process, self.name, self.is_emulated = process, name, is_emulated
        self.spells: list[tuple[float, float]] = []
        """When it was killed, stopped or told to cut answers off: from, to."""

    @property
    def url(self) -> str:
        return self.process.url

    async def start(self) -> None:
        await self.process.start()
        await self.process.wait_ready(READY_S)

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.killpg(self.process.pid, number)

    async def do(self, way: str) -> None:
        async with aiohttp.ClientSession() as http, http.post(f"{self.url}/way", data=way) as reply:
            assert reply.status == 200


def emulated(number: int, folder: Path, speed: float, tokenizer: Path | None) -> Replica:
    [port] = free_ports(1)
    name = f"chaos-{number}"
    argv = (
        sys.executable,
        "-m",
        "chaos.replica",
        name,
        str(port),
        str(speed),
        *([str(tokenizer)] if tokenizer else []),
    )
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    command = Command(argv, {**os.environ, "PYTHONPATH": path}, port)
    return Replica(ReplicaProcess(name, command, folder / f"{name}.log"), name, is_emulated=True)


def real_vllm(count: int, folder: Path) -> list[Replica]:
    options = LaunchOptions(
        engine="vllm",
        replicas=count,
        threads=1,
        log_dir=folder,
        model=str(TINY_MODEL),
        served_model_name=MODEL,
        kv_tokens=32_768,
        max_model_len=2048,
        device="cpu",
        executable=VLLM,
        ready_timeout_s=READY_S,
    )
    return [Replica(process, process.name, is_emulated=False) for process in Fleet(options).replicas] if count else []


class Gateway:
    """All processes of one gateway, on a socket that outlives them. `process`: the first, which gets the signals."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def memory_mb(self) -> float:
        """Resident memory, 0 where the system does not show it."""
        with contextlib.suppress(OSError):
            pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in tree(self.process.pid))
            return round(pages * resource.getpagesize() / 2**20, 1)
        return 0.0

    def open_files(self) -> int:
        """Open file descriptors, 0 where the system does not show them."""
        with contextlib.suppress(OSError):
            return sum(1 for pid in tree(self.process.pid) for _ in Path(f"/proc/{pid}/fd").iterdir())
        return 0

    def limit_files(self, size: int | None) -> None:
        """From now on no file of the gateway grows beyond `size` bytes: to it, the disk is full. None: no limit.

        Needs no rights, and leaves the machine's own disks alone (Linux only).
        """
        for pid in tree(self.process.pid):
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def ended(self) -> None:
        """Raises: AssertionError: it ended with an error."""
        assert await self.process.wait() == 0


class Cluster:
    """Replicas, and one gateway after another on the same socket. An async context manager."""

    def __init__(self, folder: Path, replicas: Sequence[Replica], guest: Replica) -> None:
        """`guest`: a replica that is not configured and does not run at first."""
        self.folder, self.replicas, self.guest = folder, replicas, guest
        self.keys_file = folder / "keys.toml"
        self.log = folder / "gateway.log"
        self.num_gateways = 0

    async def __aenter__(self) -> Cluster:
        self._stack = AsyncExitStack()
        self._listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2048))
        self._listener.set_inheritable(True)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._stack.push_async_callback(self._stop_all)
        await asyncio.gather(*(replica.start() for replica in self.replicas))
        self.write_keys(KEYS)
        self._write_config()
        self.gateway = await self.new_gateway()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _stop_all(self) -> None:
        if hasattr(self, "gateway") and self.gateway.process.returncode is None:
            self.gateway.end(signal.SIGINT)
            await self.gateway.ended()
        await asyncio.gather(*(replica.process.stop() for replica in (*self.replicas, self.guest)))

    def write_keys(self, keys: dict[str, str], *, broken: bool = False) -> None:
        limits = {ADMIN: "admin = true", FLOOD: "prompts_at_once = 256"}
        tables = [
            f'[{name}]\nsha256 = "{sha256(key.encode()).hexdigest()}"\n{limits.get(name, "")}\n'
            for name, key in keys.items()
        ]
        self.keys_file.write_text("not TOML [" if broken else "\n".join(tables))

    def _write_config(self) -> None:
        """Replicas come back soon, so that much can go wrong in a short time; a busy machine makes none look dead."""
        replicas = ", ".join(f'"{replica.url}"' for replica in self.replicas)
        self.config_file = self.folder / "preble.toml"
        self.config_file.write_text(
            f'replicas = [{replicas}]\nprofile = "tiny-cpu"\n'
            f'[auth]\nkeys_file = "{self.keys_file}"\n'
            f"[timeouts]\ndrain_s = {DRAIN_S}\nconnect_s = {PATIENCE_S}\n"
            f"[health]\ncheck_interval_s = 1.0\ncheck_timeout_s = {PATIENCE_S}\nretry_min_s = 0.1\nretry_max_s = 0.5\n"
            "[ejection]\nfirst_out_s = 0.5\nlongest_out_s = 2.0\nstall_s = 4.0\n"
            "[parity]\nenabled = false\n[decisions]\nlog_max_mib = 64\n"
        )

    async def new_gateway(self) -> Gateway:
        """Start one more on the socket; return once it takes requests."""
        self.num_gateways += 1
        log = self.folder / f"decisions-{self.num_gateways}.jsonl"
        argv = ("-m", "preble", "serve", "--config", str(self.config_file), "--log-format", "json")
        number = self._listener.fileno()
        with self.log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", ON_GIVEN_SOCKET, str(number), *argv),
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "PREBLE_DECISIONS__LOG": str(log)},
                pass_fds=(number,),
            )
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            assert b"listening" in await process.stdout.readline(), "the gateway did not start"
        return Gateway(process)
