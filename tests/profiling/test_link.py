"""Links measured between emulated replicas: on a virtual clock, and over real sockets."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from preble.cli import cli
from preble.core.costs.model import CostModel
from preble.core.types import ReplicaSpec, Role
from preble.emulator import EmulatorConfig, EmulatorServer
from preble.emulator.kv.p2p_tier import KvSource
from preble.emulator.metrics import MetricsPage
from preble.engines import EngineInfo, connect
from preble.errors import ConfigError, EngineProtocolError
from preble.lab.profiling.link import CopyTimes, LinkMeasurements, LinkMeasuring, with_link
from preble.profiles import load_profile
from support.in_process import KV_TOKENS, LONGEST, WAY_S, InProcess
from support.linked import KV_BYTES, linked_profile
from support.virtual_time import VirtualTimeLoop

BLOCK = 16
LATENCY_S, BYTES_PER_S = 0.02, 2e7


class Replica(InProcess):
    """One of two that copy from each other, without a network."""

    def __init__(self, file: Path, other: Replica | None = None) -> None:
        super().__init__(load_profile(str(file)), 256, p2p=True)
        self.kv_peer = "other:1"
        self.http = SimpleNamespace(ask=self._ask)
        self.paired = lambda source: None
        self.forgets = False
        self.source = other

        async def blocks(source: KvSource) -> frozenset[int]:
            assert (source.remote_host, source.remote_port, self.source is None) == ("other", 1, False)
            return (
                frozenset() if self.forgets or self.source is None else self.source.emulated.scheduler.cached_hashes()
            )

        assert self.emulated.peers is not None
        self.emulated.peers.blocks = blocks  # type: ignore[method-assign]

    async def _ask(self, path: str) -> SimpleNamespace:
        return SimpleNamespace(content=MetricsPage([self.emulated], "m", BLOCK).render())

    async def probe(self) -> SimpleNamespace:
        spec = ReplicaSpec(self.replica_id, kv_capacity_tokens=KV_TOKENS, transfer_group="all")
        return SimpleNamespace(engine=self, info=EngineInfo("emulator", ("m",), spec, LONGEST))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return linked_profile(tmp_path, s_per_token=1e-3, bytes_per_s=BYTES_PER_S, latency_s=LATENCY_S)


def measured(file: Path, **changes: Any) -> LinkMeasurements:
    """What is measured on a virtual clock; `changes`: of the replica that copies."""

    async def measure() -> LinkMeasurements:
        source = Replica(file)
        target = Replica(file, source)
        for name, value in changes.items():
            setattr(target, name, value)
        computing = [asyncio.create_task(replica.emulated.run()) for replica in (source, target)]
        measurements = await LinkMeasuring(source, target, seed=7).run()  # type: ignore[arg-type]
        for task in computing:
            task.cancel()
        return measurements

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(measure())


def test_the_link_that_is_found_is_the_one_by_which_the_replicas_go(file: Path) -> None:
    found = measured(file)
    plain = load_profile("tiny-cpu")
    linked = with_link(plain, found)
    one_token_s = CostModel(load_profile(str(file))).iteration_s([(1, 1000)], 0, 0)
    assert linked.kv_bytes_per_token == KV_BYTES
    assert linked.link_bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.05)
    assert linked.link_latency_s == pytest.approx(LATENCY_S + WAY_S + one_token_s, rel=0.1)
    assert replace(linked, source="", kv_bytes_per_token=None, link_bytes_per_s=None) == replace(
        plain, source="", link_latency_s=linked.link_latency_s
    ), "the rest of the profile stays"
    assert all(len(times.copied_s) == len(times.computed_s) == 5 for times in found.copies)
    longest = found.copies[-1]
    assert longest.tokens == LONGEST // 2 // BLOCK * BLOCK
    assert min(longest.computed_s) > max(longest.copied_s)


def test_copies_that_bring_nothing_end_the_measurement(file: Path) -> None:
    with pytest.raises(EngineProtocolError, match=r"had 0 of 368 tokens .* and so 3 times"):
        measured(file, forgets=True)


def test_a_replica_without_a_tier_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="has no p2p tier"):
        measured(file, kv_peer=None)


def link_of(seconds: dict[int, float], kv_bytes: int | None = None) -> LinkMeasurements:
    copies = tuple(CopyTimes(tokens, (1.0,), (copied_s,)) for tokens, copied_s in seconds.items())
    return LinkMeasurements(date="today", model="m", seed=1, kv_bytes_per_token=kv_bytes, copies=copies)


def test_a_token_has_as_many_bytes_as_its_profile_says_where_nobody_counts_them() -> None:
    found = with_link(load_profile("a6000-mistral-7b"), link_of({1000: 0.11, 2000: 0.21}))
    assert found.kv_bytes_per_token == 131_072
    assert (found.link_bytes_per_s, found.link_latency_s) == (pytest.approx(1.311e9), pytest.approx(0.01))
    unknown = replace(load_profile("a6000-mistral-7b"), name="mine")
    with pytest.raises(ConfigError, match="put kv_bytes_per_token into the profile"):
        with_link(unknown, link_of({1000: 0.11, 2000: 0.21}))


@pytest.mark.parametrize("seconds", [{1000: 0.2, 2000: 0.2}, {1000: 0.2}])
def test_a_link_without_a_rate_is_refused(seconds: dict[int, float]) -> None:
    with pytest.raises(ConfigError, match="the link has no rate"):
        with_link(load_profile("tiny-cpu"), link_of(seconds, KV_BYTES))


def emulated(file: Path, **settings: Any) -> EmulatorConfig:
    return EmulatorConfig(profile=str(file), block_size=BLOCK, kv_tokens=4000, max_model_len=1000, **settings)


@pytest.mark.parametrize(
    ("kind", "flags", "setting"),
    [("p2p", ("--profile", "tiny-cpu"), "a6000-mistral-7b"), ("nixl", (), "tiny-cpu")],
    ids=["p2p, by a flag", "nixl, by the environment"],
)
async def test_the_command_adds_the_link_to_a_profile(
    file: Path, tmp_path: Path, kind: str, flags: tuple[str, ...], setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREBLE_PROFILE", setting)
    config = emulated(file, **{kind: True})
    linked, raw = tmp_path / "mine.json", tmp_path / "raw.json"
    async with EmulatorServer(config) as source, EmulatorServer(config) as target:
        arguments = ["profile", "--transfer", source.url, target.url, *flags, "-o", str(linked)]
        arguments += ["--raw", str(raw), "--quick"]
        command = await asyncio.create_subprocess_exec(sys.executable, "-m", "preble", *arguments, stdout=PIPE)
        shown, _ = await command.communicate()
        assert command.returncode == 0
        assert source.engine.copied_tokens == 0 < target.engine.copied_tokens
    written = load_profile(str(linked))
    assert (written.name, written.kv_bytes_per_token) == ("mine", KV_BYTES)
    assert written.prefill_points == load_profile("tiny-cpu").prefill_points
    assert written.link_bytes_per_s and written.link_latency_s >= LATENCY_S
    assert b"computed ms" in shown
    assert len(json.loads(raw.read_text())["copies"]) == 5


async def test_the_link_of_a_pair_with_roles_is_measured_in_its_direction(file: Path) -> None:
    prefill, decode = (emulated(file, role=role) for role in (Role.PREFILL, Role.DECODE))
    async with EmulatorServer(prefill) as source, EmulatorServer(decode) as target:
        servers = connect(source.url), connect(target.url)
        found = await LinkMeasuring(*servers, seed=7, quick=True).run()
        with pytest.raises(ConfigError, match="these are decode and prefill"):
            await LinkMeasuring(*reversed(servers), seed=7, quick=True).run()
        for server in servers:
            await server.close()
    assert found.kv_bytes_per_token is None, "SGLang counts no bytes"
    assert with_link(load_profile(str(file)), found).link_bytes_per_s
    assert all(min(times.copied_s) >= LATENCY_S for times in found.copies)


def test_the_command_takes_a_replica_or_two() -> None:
    for wrong in ([], ["--url", "http://a:1", "--profile", "tiny-cpu"], ["--transfer", "http://a:1", "http://b:1"]):
        result = CliRunner().invoke(cli, ["profile", "-o", "mine.json", *wrong])
        assert (result.exit_code, "give either --url, or --transfer" in result.stderr) == (2, True)


def test_what_the_environment_names_is_for_a_link_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREBLE_PROFILE", "no-such")
    for arguments, says in (
        (["profile", "-o", "mine.json", "--transfer", "http://a:1", "http://b:1"], "no-such"),
        (["up", "--engine", "vllm", "--model", "x", "--transfer", "nixl"], "no-such"),
        (["profile", "-o", "mine.json", "--url", "http://127.0.0.1:1", "--quick"], "127.0.0.1:1"),
    ):
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code and says in str(result.exception) + result.output, result.output


def test_what_says_nothing_of_a_link_is_refused() -> None:
    link = ["--transfer", "http://a:1", "http://b:1", "--profile", "tiny-cpu"]
    result = CliRunner().invoke(cli, ["profile", "-o", "mine.json", *link, "--tier", "host", "--kv-tokens", "9"])
    assert (result.exit_code, "leave out --tier, --kv-tokens" in result.stderr) == (2, True)
