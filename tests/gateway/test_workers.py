"""`preble serve --workers 2`: several processes that serve as one, whichever of them dies."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from hashlib import sha256
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from yarl import URL

from gateway.fakes import FakeReplica, gated, replicas
from preble.config import AuthConfig, GatewayConfig
from preble.errors import ConfigError
from preble.gateway.app import App
from preble.gateway.handover import Inherited
from preble.gateway.http.access import KeyRing
from preble.gateway.workers import process, supervisor, worker
from preble.gateway.workers.messages import Cover, Drain, Settings
from preble.gateway.workers.supervisor import run_workers
from preble.gateway.workers.worker import WorkerProcess
from preble.serving import Serving
from preble.web.server.listening import listen
from support.load import load
from support.processes import children
from support.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shares a port and reads /proc")
CONFIG = """
replicas = [{replicas}]
{top}
[timeouts]
drain_s = 0.2
[discovery]
file_interval_s = 0.1
[parity]
enabled = false
[auth]
admin_keys = ["{key}"]
"""
TOP = 'workers = 2\nengine = "openai"'
START = "import runpy; import preble.gateway.workers.count as count, preble.gateway.workers.supervisor as supervisor; "
RUN = "; runpy.run_module('preble', run_name='__main__')"


class Gateway:
    """The first process of a running gateway. `admin`: a client with an admin's key."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log
        self.key = "a-key"

    def http(self, key: str | None = None) -> aiohttp.ClientSession:
        """A client whose every request may meet another front end."""
        headers = {"authorization": f"Bearer {key or self.key}"}
        return aiohttp.ClientSession(self.url, headers=headers, connector=aiohttp.TCPConnector(force_close=True))

    def processes(self) -> dict[str, int]:
        """The process of each name, as the log tells their births."""
        found = {}
        for pid in children(self.process.pid):
            with contextlib.suppress(OSError):
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found[pid] = listens(pid)
        [scheduler] = [pid for pid, has_port in found.items() if not has_port]
        fronts = sorted(pid for pid, has_port in found.items() if has_port)
        return {"scheduler": scheduler} | {f"front-{i}": pid for i, pid in enumerate(fronts)}

    async def metrics(self) -> str:
        async with self.http() as http, http.get("/metrics") as answer:
            return await answer.text()

    async def ready(self) -> dict[str, Any]:
        async with self.http() as http, http.get("/ready") as answer:
            page: dict[str, Any] = await answer.json()
            return page

    def logged(self, event: str) -> int:
        return self.log.read_text(encoding="utf-8").count(event)

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()


def listens(pid: int) -> bool:
    """Whether a process has a TCP socket that listens."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    links = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.add(str(fd.readlink()))
    return not listening.isdisjoint(links)


@asynccontextmanager
async def workers(
    folder: Path, fakes: list[FakeReplica], *, top: str = TOP, more: str = "", but: str = "pass"
) -> AsyncIterator[Gateway]:
    """`top`, `more`: lines of the configuration. `but`: what the first process executes before it starts."""
    config = folder / "preble.toml"
    write(config, fakes, "a-key", top=top, more=more)
    log = folder / "log.txt"
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", f"{START}{but}{RUN}", "serve", "--config", str(config), "--port", "0"),
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            line = (await process.stdout.readline()).decode()
        assert "listening on " in line, log.read_text(encoding="utf-8")
        gateway = Gateway(process, line.split()[-1], log)
        await eventually(lambda: is_ready(gateway))
        yield gateway
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            await process.wait()


async def is_ready(gateway: Gateway) -> bool:
    page = await gateway.ready()
    return page["status"] == "ready" and "states" in page and page["states"].get("live") == page["configured"]


def write(config: Path, fakes: list[FakeReplica], key: str, *, top: str = TOP, more: str = "") -> None:
    text = CONFIG.format(replicas=", ".join(f'"{fake.url}"' for fake in fakes), key=key, top=top) + more
    fresh = config.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(config)


async def nothing_is_left(gateway: Gateway) -> bool:
    lines = (await gateway.metrics()).splitlines()
    left = [line for line in lines if line.startswith(("preble_in_flight{", "preble_prompts_admitted"))]
    return bool(left) and all(float(line.split()[-1]) == 0 for line in left)


def total(metrics: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name))


async def test_several_processes_answer_as_one_and_end_together(tmp_path: Path) -> None:
    async with replicas(2) as fakes, workers(tmp_path, fakes) as gateway:
        async with load(gateway.http, 8) as clients:
            await clients.some_more(60)
        assert clients.wrong == []
        await eventually(lambda: nothing_is_left(gateway))
        text = await gateway.metrics()
        assert total(text, "preble_placements_total") == sum(len(fake.requests) for fake in fakes) >= 60
        cpu = {line.split('"')[1] for line in text.splitlines() if line.startswith("preble_process_cpu_seconds_total")}
        assert cpu == {"scheduler", "front-end-1", "front-end-2"}
        async with gateway.http() as http:
            async with http.post("/replicas/drain", params={"url": fakes[0].url}) as answer:
                assert answer.status == 200
            async with http.get("/debug/decisions") as answer:
                assert len((await answer.json())["decisions"]) == 20
        before = len(fakes[0].requests)
        async with load(gateway.http) as clients:
            await clients.some_more()
        assert clients.wrong == [] and len(fakes[0].requests) == before, "whichever front end is asked"
        pids = gateway.processes().values()
        assert await gateway.stop() == 0
        await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


async def test_a_killed_front_end_loses_its_own_requests_and_is_started_again(tmp_path: Path) -> None:
    async with replicas(2) as fakes, workers(tmp_path, fakes) as gateway:
        old = gateway.processes()
        async with load(gateway.http, 8) as clients:
            await clients.some_more()
            os.kill(old["front-0"], signal.SIGKILL)
            lost = len(clients.wrong)
            await clients.some_more(40)
            await eventually(lambda: gateway.logged("carrier_connected") == 3)
            await clients.some_more()
        assert len(clients.wrong) - lost <= 8, "one for each client that it served in that moment"
        assert not [text for text in clients.wrong if text[0].isdigit()], "broken connections, no error answers"
        await eventually(lambda: nothing_is_left(gateway))
        assert len(gateway.processes()) == 3 and gateway.processes() != old
        assert total(await gateway.metrics(), 'preble_responses_total{model="tiny",path="/v1/completions"') > 0


async def test_a_killed_scheduler_process_loses_no_request(tmp_path: Path) -> None:
    async with replicas(2) as fakes, workers(tmp_path, fakes) as gateway:
        fakes[0].script.append(gated)
        fakes[1].script.append(gated)
        async with gateway.http() as http, load(gateway.http, 6) as clients:
            held = [asyncio.create_task(http.post("/v1/completions", json={"prompt": "held"})) for _ in range(2)]
            await eventually(lambda: sum(fake.running for fake in fakes) >= 2)
            os.kill(gateway.processes()["scheduler"], signal.SIGKILL)
            await eventually(lambda: clients.reasons["scheduler_away"] > 0)
            assert (await gateway.ready()).get("scheduler") in ("away", None)
            await eventually(lambda: gateway.logged("carrier_connected") == 4)
            away = clients.reasons["scheduler_away"]
            await eventually(lambda: is_ready(gateway))
            for fake in fakes:
                fake.gate.set()
            async with asyncio.timeout(PATIENCE_S):
                assert [(await task).status for task in held] == [200, 200], "what was under way goes on"
            await clients.some_more()
        assert clients.wrong == []
        assert clients.reasons.total() - clients.reasons["scheduler_away"] > 0 and away > 0
        await eventually(lambda: nothing_is_left(gateway))


async def test_a_scheduler_process_that_hangs_holds_nobody_up_for_long(tmp_path: Path) -> None:
    async with replicas(1) as fakes, workers(tmp_path, fakes) as gateway:
        scheduler = gateway.processes()["scheduler"]
        os.kill(scheduler, signal.SIGSTOP)
        try:
            async with gateway.http() as http, http.post("/v1/completions", json={"prompt": "a"}) as answer:
                assert (answer.status, answer.headers["x-preble-reason"]) == (200, "scheduler_away")
        finally:
            os.kill(scheduler, signal.SIGCONT)
        await eventually(lambda: is_ready(gateway))
        await eventually(lambda: nothing_is_left(gateway))


@pytest.mark.parametrize("name", ["front-0", "front-1", "scheduler"])
async def test_a_process_that_hangs_is_replaced_and_meanwhile_the_others_serve(tmp_path: Path, name: str) -> None:
    async with replicas(1) as fakes, workers(tmp_path, fakes) as gateway:
        hung = gateway.processes()[name]
        os.kill(hung, signal.SIGSTOP)
        async with load(gateway.http, 4) as clients:  # each request with a connection of its own
            await eventually(lambda: gateway.logged("process_hangs") == 1)
            await eventually(lambda: not is_alive(hung))
            await clients.some_more()
        assert clients.wrong == []
        await eventually(lambda: gateway.logged("process_died") == 1)
        await eventually(lambda: is_ready(gateway))
        await eventually(lambda: len(gateway.processes()) == 3)
        await eventually(lambda: nothing_is_left(gateway))


async def test_a_front_end_that_hangs_for_a_moment_only_is_not_replaced(tmp_path: Path) -> None:
    async with replicas(1) as fakes, workers(tmp_path, fakes) as gateway:
        before = gateway.processes()
        os.kill(before["front-0"], signal.SIGSTOP)
        await eventually(lambda: gateway.logged("process_silent") == 1)
        assert [await status(gateway, "a-key") for _ in range(8)] == [200] * 8, "another one accepts in its place"
        os.kill(before["front-0"], signal.SIGCONT)
        assert [await status(gateway, "a-key") for _ in range(8)] == [200] * 8
        assert gateway.processes() == before


async def test_settings_change_in_every_process_or_in_none(tmp_path: Path) -> None:
    async with replicas(1) as fakes, workers(tmp_path, fakes) as gateway:
        config = tmp_path / "preble.toml"
        write(config, fakes, "another-key")
        await eventually(lambda: gateway.logged("reloaded") == 1)
        for _ in range(8):
            assert [await status(gateway, key) for key in ("a-key", "another-key")] == [401, 200]
        gateway.key = "another-key"
        config.write_text('limits = "nonsense"', encoding="utf-8")
        gateway.process.send_signal(signal.SIGHUP)
        await eventually(lambda: gateway.logged("reload_failed") >= 1)
        assert await status(gateway, "another-key") == 200


async def test_a_process_that_starts_again_has_the_settings_of_the_others(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[a]\nsha256 = "{sha256(b"named").hexdigest()}"\n', encoding="utf-8")
    more = f'keys_file = "{keys}"\n'
    async with replicas(1) as fakes, workers(tmp_path, fakes, more=more) as gateway:
        keys.write_text('[a]\nsha256 = "half-wri', encoding="utf-8")
        await eventually(lambda: gateway.logged("reload_failed") == 1)
        keys.write_text(f'[a]\nsha256 = "{sha256(b"other").hexdigest()}"\n', encoding="utf-8")
        top = f'{TOP}\ntokenizer = "/nowhere"'
        write(tmp_path / "preble.toml", fakes, "another-key", top=top, more=more)
        gateway.key = "another-key"
        await eventually(lambda: gateway.logged("restart_needed") >= 1)
        keys.write_text("half-wri", encoding="utf-8")
        for name, connected in (("front-0", 3), ("scheduler", 5)):
            os.kill(gateway.processes()[name], signal.SIGKILL)
            await eventually(lambda: gateway.logged("carrier_connected") == connected)  # noqa: B023 (awaited here)
        await eventually(lambda: is_ready(gateway))
        for _ in range(8):
            assert [await status(gateway, key) for key in ("named", "a-key")] == [401, 401]
            assert [await status(gateway, key) for key in ("other", "another-key")] == [200, 200]


async def test_a_front_end_that_does_not_answer_a_reload_gets_the_new_keys_by_starting_again(tmp_path: Path) -> None:
    async with replicas(1) as fakes, workers(tmp_path, fakes) as gateway:
        hung = gateway.processes()["front-0"]
        os.kill(hung, signal.SIGSTOP)
        write(tmp_path / "preble.toml", fakes, "another-key")
        await eventually(lambda: gateway.logged("reload_refused") == 1)
        gateway.key = "another-key"
        await eventually(lambda: gateway.logged("carrier_connected") == 3)
        assert hung not in gateway.processes().values()
        for _ in range(8):
            assert [await status(gateway, key) for key in ("a-key", "another-key")] == [401, 200]


async def test_a_scheduler_process_that_does_not_answer_a_reload_gets_it_when_it_is_back(tmp_path: Path) -> None:
    async with replicas(1) as fakes, workers(tmp_path, fakes) as gateway:
        os.kill(gateway.processes()["scheduler"], signal.SIGSTOP)
        write(tmp_path / "preble.toml", fakes, "another-key")
        await eventually(lambda: gateway.logged("reload_waits") >= 1)
        gateway.key = "another-key"
        await eventually(lambda: gateway.logged("reloaded") == 1)
        for _ in range(8):
            assert [await status(gateway, key) for key in ("a-key", "another-key")] == [401, 200]
        assert await gateway.stop() == 0


async def test_a_reload_brings_no_adapter_of_ones_own_to_several_processes(tmp_path: Path) -> None:
    three = "count.usable_cores = lambda *_: 3"
    top = 'engine = "openai"'
    async with replicas(1) as fakes, workers(tmp_path, fakes, top=top, but=three) as gateway:
        write(tmp_path / "preble.toml", fakes, "a-key", top='engine = "preble.engines.openai:OpenAIEngine"')
        await eventually(lambda: gateway.logged("reload_failed") == 1)
        assert gateway.logged("needs a gateway of one process") == 1
        assert await status(gateway, "a-key") == 200


async def test_connections_are_refused_while_the_last_requests_end(tmp_path: Path) -> None:
    async with replicas(1) as [fake], workers(tmp_path, [fake]) as gateway, gateway.http() as http:
        fake.script.append(gated)
        held = asyncio.create_task(http.post("/v1/completions", json={"prompt": "held"}))
        await eventually(lambda: fake.running == 1)
        gateway.process.send_signal(signal.SIGTERM)
        await eventually(lambda: refuses(gateway))
        fake.gate.set()
        async with await held as answer:
            assert answer.status == 200
        assert await gateway.process.wait() == 0
        assert gateway.logged("graceful shutdown exceeded") == 0


async def refuses(gateway: Gateway) -> bool:
    url = URL(gateway.url)
    try:
        _, writer = await asyncio.open_connection(url.host, url.port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


def test_no_front_end_stands_in_for_another_that_has_ended_as_it_should() -> None:
    settings = Settings(GatewayConfig(), KeyRing(AuthConfig()))
    one = supervisor._Workers(settings, 2, None, Path(), [], Inherited({}), ("error", "json"))
    dead, living = one._front_ends
    dead._has_died = True
    given: list[object] = []
    living.order = given.append  # type: ignore[method-assign]
    one._cover()
    one._is_stopping = True
    one._cover()
    assert given == [Cover((0,))]


async def test_a_front_end_that_is_told_to_leave_while_it_starts_leaves_once_it_serves() -> None:
    first, control = Pipe()
    orders = process._Orders(control)
    told: list[str] = []
    try:
        first.send(Drain(leaves=True))
        await eventually(lambda: orders._drain is not None)
        orders.leave = lambda: told.append("leave")
        orders.ready(cast(App, SimpleNamespace(drain=lambda leaves: told.append("drain"))))
    finally:
        asyncio.get_running_loop().remove_reader(control.fileno())
        first.close()
        control.close()
    assert told == ["drain", "leave"]


async def status(gateway: Gateway, key: str) -> int:
    async with gateway.http(key) as http, http.post("/v1/completions", json={"prompt": "a"}) as answer:
        return answer.status


async def test_no_process_and_no_socket_outlives_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(mkdtemp())  # a socket's path is short
    monkeypatch.setenv("TMPDIR", str(folder))
    async with replicas(1) as fakes, workers(tmp_path, fakes) as gateway:
        pids = gateway.processes().values()
        gateway.process.kill()
        await gateway.process.wait()
        await eventually(lambda: not any(is_alive(pid) for pid in pids))
    await asyncio.to_thread(folder.rmdir)  # it is empty


def test_a_start_removes_what_gateways_have_left_of_which_all_processes_were_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(mkdtemp())  # a socket's path is short
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for name in ("preble-dead", "preble-lives", "preble-young", "other-dead"):
        (folder / name).mkdir()
    (folder / "preble-own").mkdir()
    (folder / "preble-own" / "file").touch()
    with ExitStack() as stack:
        lives, dead, young = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3))
        lives.bind(str(folder / "preble-lives" / "scheduler.sock"))
        lives.listen()
        dead.bind(str(folder / "preble-dead" / "scheduler.sock"))
        os.utime(folder / "preble-dead" / "scheduler.sock", (0, 0))
        young.bind(str(folder / "preble-young" / "scheduler.sock"))  # its gateway is about to listen
        with supervisor._socket_path(GatewayConfig()) as path:
            assert path.parent.parent == folder
        assert {one.name for one in folder.iterdir()} == {"preble-lives", "preble-young", "other-dead", "preble-own"}


async def test_no_process_outlives_the_first_one_that_dies_while_they_start() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "preble", "serve", "--replica", "http://127.0.0.1:9", "--port", "0", "--workers", "2"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    await eventually(lambda: len(children(process.pid)) >= 4)  # with the tracker of multiprocessing
    pids = children(process.pid)
    process.kill()
    await process.wait()
    await eventually(lambda: not any(is_alive(pid) for pid in pids))


async def test_the_scheduler_process_comes_back_though_its_folder_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(mkdtemp())
    monkeypatch.setenv("TMPDIR", str(folder))
    async with replicas(1) as fakes, workers(tmp_path, fakes) as gateway:
        [private] = await asyncio.to_thread(lambda: [*folder.iterdir()])
        await asyncio.to_thread(shutil.rmtree, private)
        os.kill(gateway.processes()["scheduler"], signal.SIGKILL)
        await eventually(lambda: gateway.logged("carrier_connected") == 4)
        await eventually(lambda: is_ready(gateway))
        assert await gateway.stop() == 0
    await asyncio.to_thread(folder.rmdir)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("is_taken", [True, False])
async def test_what_cannot_start_says_why(tmp_path: Path, is_taken: bool) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1] if is_taken else 0
        wrong = [] if is_taken else ["--tokenizer", str(tmp_path / "nothing-here")]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "preble", "serve", "--workers", "2", "--port", str(port), *wrong),
            *("--replica", "http://127.0.0.1:9"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(PATIENCE_S):
            _, said = await process.communicate()
    assert process.returncode == 2
    assert b"choose another port" in said if is_taken else b"nothing-here" in said


def test_without_a_temporary_folder_the_gateway_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not-there"))
    with pytest.raises(ConfigError, match="set TMPDIR to a folder that can be written, or set scheduler_socket"):
        run_workers(GatewayConfig(port=0), 2, log=("error", "json"))


@pytest.mark.parametrize("folder", ["f" * 120, "not-there"])
async def test_a_socket_that_cannot_be_made_says_what_to_set(tmp_path: Path, folder: str) -> None:
    scheduler = await Serving.start(GatewayConfig())
    with pytest.raises(ConfigError, match="set scheduler_socket, or TMPDIR, to a short path that can be written"):
        await scheduler.listen(tmp_path / folder / "scheduler.sock")
    await scheduler.close()


async def test_a_process_for_which_there_is_no_room_now_starts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[None] = []

    def begin(worker: WorkerProcess) -> None:
        tried.append(None)
        if len(tried) < 3:
            raise OSError(errno.EAGAIN, "no process is left")
        worker._died.clear()

    monkeypatch.setattr(WorkerProcess, "_begin", begin)
    worker = WorkerProcess(lambda: pytest.fail("unused"), lambda: None)
    worker._died.set()
    keeping = asyncio.create_task(worker._keep())
    await eventually(lambda: len(tried) == 3)
    assert not keeping.done()
    keeping.cancel()


class Started:
    """A process that takes orders, to look at."""

    taken: Connection

    def __init__(self, args: tuple[Any, Connection], **_: object) -> None:
        self._control = args[1]
        self.sentinel, self._end = os.pipe()

    def start(self) -> None:
        type(self).taken = Connection(os.dup(self._control.fileno()))

    def close(self) -> None:
        self.taken.close()
        os.close(self.sentinel)
        os.close(self._end)


async def test_a_process_that_starts_again_drains_if_the_one_before_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would accept connections beside a gateway's successor."""
    settings = Settings(GatewayConfig(), KeyRing(AuthConfig()))
    monkeypatch.setattr(worker, "_SPAWN", SimpleNamespace(Pipe=Pipe, Process=Started))  # ships real processes
    one = WorkerProcess(lambda: cast(Any, SimpleNamespace(name="one", settings=settings)), lambda: None)
    one.order(Drain(leaves=True))
    one._begin()
    try:
        assert await asyncio.to_thread(Started.taken.poll, PATIENCE_S)
        assert Started.taken.recv() == Drain(leaves=True)
    finally:
        loop, ours, process = asyncio.get_running_loop(), one._control, cast(Any, one._process)
        assert ours is not None
        loop.remove_reader(ours.fileno())
        loop.remove_reader(process.sentinel)
        ours.close()
        process.close()


async def test_every_front_end_feeds_the_live_page(tmp_path: Path) -> None:
    async with replicas(2) as fakes, workers(tmp_path, fakes) as one:
        for _ in range(4):  # each connection may meet another front end
            async with one.http() as http, http.get("/ui") as answer:
                assert answer.status == 200
            async with one.http() as http, http.get("/ui/events") as answer:
                first, second = [await answer.content.readuntil(b"\n\n") for _ in range(2)]
            assert {row["name"] for row in json.loads(first[6:])["replicas"]} == {fake.url for fake in fakes}
            assert json.loads(second[6:])["at"] > json.loads(first[6:])["at"]
        async with one.http("no-key") as http, http.get("/ui/events") as answer:
            assert answer.status == 401
