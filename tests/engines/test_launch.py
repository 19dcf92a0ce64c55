"""Starting replicas and leaving none behind, with a small program in the engine's place."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from preble.core.types import Role
from preble.engines import connect
from preble.engines.starting import commands, guard
from preble.engines.starting.commands import LaunchOptions, commands_for
from preble.engines.starting.launch import Fleet, ReplicaProcess
from preble.engines.starting.ports import free_ports
from preble.engines.starting.programs import find_vllm
from preble.engines.vllm.answers import TransferConfig
from preble.errors import ConfigError, EngineGone, EngineTimeout
from support.pairs import pair_of
from support.waiting import PATIENCE_S, eventually

FAKE = Path(__file__).parent.parent / "support" / "fake_vllm.py"


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., LaunchOptions]:
    """Options to start the stand-in with; the model's name says how it behaves."""
    program = tmp_path / "vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    program.chmod(0o755)

    def make(behaviour: str = "healthy", **more: Any) -> LaunchOptions:
        defaults: dict[str, Any] = {"replicas": 2, "device": "cpu", "executable": program, "log_dir": tmp_path / "logs"}
        return LaunchOptions(engine="vllm", model=behaviour, **{**defaults, **more})

    return make


def is_running(pid: int) -> bool:
    """Whether a process is there and is no zombie; one may end while its file is read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids_of(replica: ReplicaProcess) -> list[int]:
    """The engine and the child that it has started."""
    assert replica.pid is not None
    return [replica.pid, *child_pids(replica.log_path)]


def child_pids(log: Path) -> list[int]:
    return [int(pid) for pid in re.findall(r"child (\d+)", log.read_text())]


async def test_a_fleet_is_ready_when_entered_and_gone_with_its_children_when_left(options: Any) -> None:
    ready: list[str] = []
    async with Fleet(options(), on_ready=lambda replica: ready.append(replica.name)) as fleet:
        pids = [pid for replica in fleet.replicas for pid in pids_of(replica)]
        assert sorted(ready) == ["vllm-0", "vllm-1"]
        assert len(set(fleet.urls)) == 2
        assert len(pids) == 4
        assert all(is_running(pid) for pid in pids)
    assert not any(is_running(pid) for pid in pids)


async def test_a_replica_that_dies_is_reported_with_the_end_of_its_log(options: Any) -> None:
    with pytest.raises(EngineGone, match=r"ended with status 1(?s:.*)out of memory, says the engine"):
        async with Fleet(options("dies")):
            pass


@pytest.mark.parametrize(
    ("room", "said"),
    [
        pytest.param(0, "cannot be started: {log} cannot be written: File too large", id="no room"),
        pytest.param(40, r"\(the log takes no more: File too large\)", id="room for a line"),
    ],
)
def test_a_replica_whose_log_has_no_room_says_so(tmp_path: Path, room: int, said: str) -> None:
    """In a process of its own, whose files take no more than so many bytes."""
    process = subprocess.run(
        [sys.executable, "-B", "-m", "preble", "up", "--engine=emulator", "--port=0", "--log-dir", str(tmp_path)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode != 0
    assert re.search(said.format(log=tmp_path / "emulator-[01].log"), process.stderr), process.stderr
    assert "Traceback" not in process.stderr


async def test_a_replica_that_refuses_its_arguments_is_the_users_mistake(options: Any) -> None:
    with pytest.raises(ConfigError, match=r"refuses its arguments(?s:.*)error: unrecognized arguments"):
        async with Fleet(options("refuses")):
            pass


async def test_a_replica_that_does_not_get_ready_is_stopped_and_reported(options: Any, tmp_path: Path) -> None:
    fleet = Fleet(options("never-ready", replicas=1, ready_timeout_s=1.0))
    with pytest.raises(EngineTimeout, match="not ready within 1 s"):
        await fleet.__aenter__()
    assert not any(is_running(pid) for pid in child_pids(fleet.replicas[0].log_path))


async def test_a_replica_that_ignores_being_asked_is_killed(options: Any) -> None:
    async with Fleet(options("stubborn", replicas=1, grace_s=0.2)) as fleet:
        pids = pids_of(fleet.replicas[0])
    assert not any(is_running(pid) for pid in pids)


async def test_what_an_engine_leaves_in_its_temporary_folder_goes_with_it(options: Any) -> None:
    async with Fleet(options()) as fleet:
        sockets = [Path(re.findall(r"socket (\S+)", replica.log_path.read_text())[0]) for replica in fleet.replicas]
        assert all(path.is_socket() for path in sockets)
        await fleet.replicas[0].kill()
        await eventually(lambda: not sockets[0].parent.exists(), "of the one that was killed")
    assert not any(path.parent.exists() for path in sockets)


async def test_a_cancelled_start_leaves_nothing_behind(options: Any) -> None:
    fleet = Fleet(options("never-ready"))
    task = asyncio.create_task(fleet.__aenter__())
    logs = [replica.log_path for replica in fleet.replicas]
    await eventually(lambda: all(log.exists() and child_pids(log) for log in logs), "both started")
    pids = [pid for replica in fleet.replicas for pid in pids_of(replica)]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(is_running(pid) for pid in pids)


async def test_a_killed_replica_is_noticed_and_can_be_started_again_at_its_address(options: Any) -> None:
    async with Fleet(options()) as fleet:
        victim, survivor = fleet.replicas
        exit_seen = asyncio.create_task(victim.wait())
        url, pids = victim.url, pids_of(victim)
        await victim.kill()
        assert await exit_seen == 128 + signal.SIGKILL
        await eventually(lambda: not any(is_running(pid) for pid in pids), "its child is gone too")
        assert survivor.is_alive
        await victim.start()
        await victim.wait_ready(PATIENCE_S)
        assert victim.url == url


PARENT = """
import asyncio, signal, sys
from pathlib import Path
from preble.engines.starting.launch import Fleet, LaunchOptions

async def main():
    options = LaunchOptions(engine="vllm", model="healthy", replicas=2, device="cpu",
                            executable=Path(sys.argv[1]), log_dir=Path(sys.argv[2]))
    async with Fleet(options) as fleet:
        print(*[replica.pid for replica in fleet.replicas], flush=True)
        await asyncio.Event().wait()

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in its background without it
try:
    asyncio.run(main())
except KeyboardInterrupt:
    pass
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_no_replica_outlives_a_parent_that_is_killed(
    options: Any, tmp_path: Path, number: signal.Signals
) -> None:
    executable, logs = options().executable, tmp_path / "logs"
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(executable), str(logs), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
    pids += [pid for log in logs.iterdir() for pid in child_pids(log)]
    assert len(pids) == 4
    parent.send_signal(number)
    await parent.wait()
    await eventually(lambda: not any(is_running(pid) for pid in pids), "no replica is left")


@pytest.mark.parametrize(("guard_pid", "status"), [("os.getppid()", 0), ("os.getpid()", -signal.SIGKILL)])
def test_a_program_whose_guard_was_killed_while_it_started_does_not_start(guard_pid: str, status: int) -> None:
    """It is too late then for the kernel to tell it of the guard's death."""
    started = f"import os; from preble.engines.starting.guard import prepare_program; prepare_program({guard_pid})"
    assert subprocess.run([sys.executable, "-c", started], check=False).returncode == status


SHARING = """
import array, fcntl, multiprocessing, sys, termios, time
from multiprocessing import resource_tracker
semaphore = multiprocessing.get_context("spawn").Semaphore(1)
unread = array.array("i", [1])
while unread[0]:  # until the tracker has started, and knows of the semaphore
    fcntl.ioctl(resource_tracker._resource_tracker._fd, termios.FIONREAD, unread)
    time.sleep(0.01)
print(semaphore._semlock.name, file=sys.stderr, flush=True)
time.sleep(600)
"""


def test_a_program_that_is_killed_leaves_no_shared_memory_behind() -> None:
    command = [sys.executable, "-I", "-S", guard.__file__, "5", sys.executable, "-c", SHARING]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    pid = int(process.stdout.readline())
    semaphore = Path(f"/dev/shm/sem.{process.stderr.readline().decode().strip().removeprefix('/')}")
    assert semaphore.exists()
    os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)
    assert not semaphore.exists()


LEAVING = """
import multiprocessing, sys, time
def share():
    file = open(sys.argv[1], "w")
    print("open", file=sys.stderr, flush=True)
    time.sleep(600)
if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=share).start()
    time.sleep(600)
"""


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_the_file_of_its_load_that_sglang_leaves_goes_and_that_of_others_stays(is_killed: bool) -> None:
    own, others = (Path(f"{guard.LEFT}{os.getpid()}_{name}.shm") for name in ("own", "others"))
    command = [sys.executable, "-I", "-S", guard.__file__, "5", sys.executable, "-c", LEAVING, str(own)]
    try:
        others.touch()
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None and process.stderr is not None
        pid = int(process.stdout.readline())
        assert process.stderr.readline() == b"open\n"
        assert own.exists()
        if is_killed:
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=PATIENCE_S)
        assert (own.exists(), others.exists()) == (False, True)
    finally:
        own.unlink(missing_ok=True)
        others.unlink(missing_ok=True)


def test_a_missing_program_says_what_to_do(options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="there is no vllm program"):
        Fleet(options(executable=tmp_path / "nowhere"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="make engines"):
        find_vllm(None)


def test_the_projects_own_vllm_is_found_from_a_folder_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / ".engines" / "vllm" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.touch()
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert find_vllm(None) == program


def test_wrong_options_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match="0 replicas"):
        commands_for(options(replicas=0))
    with pytest.raises(ConfigError, match="there is no model folder"):
        commands_for(options("./nowhere"))
    with pytest.raises(ConfigError, match="needs a model"):
        commands_for(LaunchOptions(engine="vllm", replicas=1, log_dir=Path("logs")))
    with pytest.raises(ConfigError, match="leave --transfer out"):
        commands_for(options(roles=(Role.PREFILL, Role.DECODE), transfer="nixl"))
    with pytest.raises(ConfigError, match="SGLang needs roles for that"):
        commands_for(LaunchOptions(engine="sglang", replicas=2, log_dir=Path("logs"), transfer="p2p"))
    with pytest.raises(ConfigError, match="on GPUs alone; --transfer nixl"):
        commands_for(options(transfer="p2p"))
    with pytest.raises(ConfigError, match="1 roles are given for 2 replicas"):
        commands_for(options(roles=(Role.PREFILL,)))


def transfer_of(command: commands.Command) -> Any:
    return json.loads(command.argv[command.argv.index("--kv-transfer-config") + 1])


@pytest.mark.parametrize("how", [{"transfer": "nixl"}, {"roles": (Role.PREFILL, Role.DECODE)}])
def test_vllm_on_a_cpu_sends_kv_with_the_projects_nixl(
    options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    packages = tmp_path / ".servers" / "nixl" / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    one, other = commands_for(options(**how))
    transfer = msgspec.convert(transfer_of(one), TransferConfig)
    assert transfer.against_splits() is None, "the gateway lets it split"
    assert transfer_of(one)["kv_buffer_device"] == "cpu"
    assert one.environ["PYTHONPATH"] == str(packages)
    assert one.environ["VLLM_SERVER_DEV_MODE"] == "1", "so that it says how it sends KV"
    ports = {command.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] for command in (one, other)}
    assert len(ports | {str(command.port) for command in (one, other)}) == 4


def test_vllm_on_gpus_copies_from_a_tier_in_half_of_the_hosts_memory(
    options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "visible_gpus", lambda: ["0", "1"])
    found = commands_for(options(transfer="p2p", device="cuda"))
    assert all("PYTHONPATH" not in command.environ for command in found)
    extras = [transfer_of(command)["kv_connector_extra_config"] for command in found]
    tiers = [tier for extra in extras for tier in extra["secondary_tiers"]]
    assert {tier["type"] for tier in tiers} == {"p2p"} and len({tier["port"] for tier in tiers}) == 2
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert sum(extra["cpu_bytes_to_use"] for extra in extras) == pytest.approx(memory / 2)


def test_each_gpu_replica_gets_a_gpu_of_its_own(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    commands = commands_for(options(device="cuda"))
    assert [command.environ["CUDA_VISIBLE_DEVICES"] for command in commands] == ["3", "5"]
    assert not any("--dtype" in command.argv for command in commands)
    with pytest.raises(ConfigError, match="3 replicas of 1 GPUs each need 3, and 2 are visible: start at most 2"):
        commands_for(options(device="cuda", replicas=3))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tensor-parallel-size", "2"),
        ("-tp", "2"),
        ("--tensor_parallel_size=2",),
        ("--pipeline-parallel-size=2",),
        ("--data-parallel-size", "2"),
        ("--data-parallel-size", "8", "--data-parallel-size-local", "2"),
        ("--tp", "2", "--dp", "2", "--enable-dp-attention"),
    ],
    ids=" ".join,
)
def test_a_replica_gets_as_many_gpus_as_its_parallel_sizes_ask_for(
    options: Any, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    commands = commands_for(options(device="cuda", extra_args=arguments))
    assert [command.environ["CUDA_VISIBLE_DEVICES"] for command in commands] == ["0,1", "2,3"]
    with pytest.raises(ConfigError, match="3 replicas of 2 GPUs each need 6, and 5 are visible: start at most 2"):
        commands_for(options(device="cuda", replicas=3, extra_args=arguments))


def test_parallel_sizes_that_no_machine_fits_are_refused_with_what_to_do(
    options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(ConfigError, match="one replica takes 4; lower its parallel sizes"):
        commands_for(options(device="cuda", replicas=1, extra_args=("-tp=2", "-dp=2")))
    with pytest.raises(ConfigError, match="--tp-size 'two' is no positive whole number"):
        commands_for(options(device="cuda", replicas=1, extra_args=("--tp-size", "two")))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_ports_of_ranks_do_not_meet(options: Any, ranks: int) -> None:
    [command] = commands_for(options(replicas=1, extra_args=("--data-parallel-size", str(ranks))))
    events = json.loads(command.argv[command.argv.index("--kv-events-config") + 1])
    first = [int(events[key].rpartition(":")[2]) for key in ("endpoint", "replay_endpoint")]
    ports = [port + rank for port in first for rank in range(ranks)]
    assert len({*ports, command.port}) == 2 * ranks + 1


def test_a_cpu_replica_of_several_ranks_has_a_process_for_each(options: Any) -> None:
    [alone] = commands_for(options(replicas=1))
    [several] = commands_for(options(replicas=1, extra_args=("--data-parallel-size", "2")))
    assert "uni" in alone.argv and alone.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "uni" not in several.argv and "VLLM_ENABLE_V1_MULTIPROCESSING" not in several.environ


def test_a_cpu_replica_holds_the_tokens_that_were_asked_for(options: Any) -> None:
    [command] = commands_for(options(replicas=1, kv_tokens=2048))
    argv = list(command.argv)
    block_size = int(argv[argv.index("--block-size") + 1])
    blocks = int(argv[argv.index("--num-gpu-blocks-override") + 1])
    assert (blocks - 1) * block_size == 2048


def test_sglang_of_our_own_environment_starts_through_the_launcher_for_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / ".engines" / "sglang" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch(0o755)
    monkeypatch.chdir(tmp_path)
    [command] = commands_for(LaunchOptions(engine="sglang", replicas=1, log_dir=tmp_path, model="org/model"))
    assert command.argv[:2] == (str(python), str(tmp_path / "dev" / "engines" / "sglang_cpu" / "launch.py"))
    assert "cpu" in command.argv and "--enable-cache-report" in command.argv
    assert command.environ["SGLANG_USE_CPU_ENGINE"] == "1"
    assert command.ready_path != "/health", "which computes a token each time"
    events = json.loads(command.argv[command.argv.index("--kv-events-config") + 1])
    load = command.argv[command.argv.index("--load-publish-endpoint") + 1]
    assert load.startswith("tcp://*:")
    assert len({load, events["endpoint"], events["replay_endpoint"], f"tcp://*:{command.port}"}) == 4


def test_sglang_of_fixed_roles_sends_kv_as_a_cpu_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / ".engines" / "sglang" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch(0o755)
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"engine": "sglang", "log_dir": tmp_path, "model": "org/model"}
    prefill, decode = commands_for(LaunchOptions(replicas=2, roles=(Role.PREFILL, Role.DECODE), **given))

    def value(argv: tuple[str, ...], name: str) -> str:
        return argv[argv.index(name) + 1]

    for command, role in ((prefill, "prefill"), (decode, "decode")):
        assert value(command.argv, "--disaggregation-mode") == role
        assert value(command.argv, "--disaggregation-transfer-backend") == "nixl"
    assert value(decode.argv, "--disaggregation-decode-retraction-backup") == "cpu_tensor"
    bootstrap_port = value(prefill.argv, "--disaggregation-bootstrap-port")
    assert bootstrap_port not in " ".join(prefill.argv).replace(f"bootstrap-port {bootstrap_port}", "")
    assert "--disaggregation-bootstrap-port" not in decode.argv


def test_any_other_sglang_is_asked_to_serve_on_the_gpus_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "sglang"
    program.touch(0o755)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    options = LaunchOptions(engine="sglang", replicas=1, log_dir=tmp_path, model="org/model", executable=program)
    [command] = commands_for(options)
    assert command.argv[:4] == (str(program), "serve", "--model-path", "org/model")
    assert "cpu" not in command.argv
    assert command.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_a_missing_sglang_is_reported_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="make engines"):
        commands_for(LaunchOptions(engine="sglang", replicas=1, log_dir=tmp_path, model="org/model"))


def test_free_ports_follow_one_another() -> None:
    first, second, third = free_ports(3)
    assert (second, third) == (first + 1, first + 2)


@pytest.mark.parametrize(
    ("clients", "below"),
    [("32768\t60999\n", 22_000), ("16000 65535", 16_000), ("1024 65535", 22_000), ("", 22_000), (None, 22_000)],
)
def test_free_ports_are_none_that_clients_or_sglang_itself_may_be_given(
    clients: str | None, below: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "ip_local_port_range"
    if clients is not None:
        told.write_text(clients)
    monkeypatch.setattr("preble.engines.starting.ports._CLIENT_PORTS", told)  # no test may change the system's own
    for _ in range(200):
        ports = free_ports(4)
        assert min(ports) >= 10_000 and max(ports) < below


async def test_emulated_replicas_are_found_ready_with_their_events(tmp_path: Path) -> None:
    options = LaunchOptions(engine="emulator", replicas=2, log_dir=tmp_path / "logs", kv_tokens=4096)
    async with Fleet(options) as fleet:
        for url in fleet.urls:
            client = connect(url)
            info = (await client.probe()).info
            await client.close()
            assert (info.engine, info.spec.kv_capacity_tokens) == ("emulator", 4096)
            assert info.spec.reports_events


async def test_who_decodes_hears_late_that_who_prefilled_was_killed(tmp_path: Path) -> None:
    given: dict[str, Any] = {"roles": ("prefill", "decode"), "extra_args": ("--speed", "100")}
    fleet = Fleet(LaunchOptions(engine="emulator", replicas=2, log_dir=tmp_path / "logs", **given))
    async with fleet, pair_of(fleet, "tiny-cpu") as pair:
        assert [answer.status for answer in await pair.answered([1, 2, 3])] == [200, 200]
        waiting = asyncio.create_task(pair.ask(pair.decode, {**pair.body([1, 2, 3]), **pair.room()}))
        await eventually(partial(pair.has_waiting, pair.decode), "its partner has no such request")
        await fleet.replicas[0].kill()
        answer = await waiting
        assert answer.status == 500
        assert "Lost connection with prefill instance" in answer.fields["message"]
