"""Gateways of a group over a real NATS server: what one places the others know, and they get on without NATS."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from hmac import digest
from pathlib import Path
from shutil import which
from typing import Any

import msgspec
import nats
import pytest
import structlog

from gateway.fakes import FakeReplica, replicas
from preble.config import AuthConfig, DecisionsConfig, PeersConfig, QueueConfig
from preble.config.keys import KeyConfig
from preble.core.types import PeerId, ReplicaId, Request, RequestId
from preble.core.types.life import FirstToken, Progress
from preble.errors import ConfigError, Overloaded
from preble.peers.packets import VERSION, Ejected, Left, Message, Used, encode, join
from preble.prompts.endpoints import COMPLETIONS
from preble.rules.callers import ANYBODY, Caller
from preble.rules.ejection import Standing
from preble.serving import Placed, Serving
from preble.serving.group import packet_keys
from serving.test_carrier import config
from support.nats import nats_server
from support.servers import not_there
from support.waiting import eventually

PROMPT = list(range(1, 400))


class Gateway:
    """One gateway of a group, without HTTP towards clients."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        assert serving.group is not None
        self.group = serving.group

    @property
    def num_assumed(self) -> int:
        return self.serving.scheduler.snapshot().num_assumed

    async def place(self, request_id: str, caller: Caller = ANYBODY) -> Placed:
        body = json.dumps({"model": "tiny", "prompt": PROMPT}).encode()
        parsed = await self.serving.parse(COMPLETIONS, {}, body, request_id, caller)
        return await self.serving.place(await self.serving.tokenize(parsed), parsed.terms)

    def metric(self, name: str) -> float:
        lines = self.serving.telemetry.exposition().decode().splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


@asynccontextmanager
async def gateway(fakes: list[FakeReplica], url: str, name: str, **changes: Any) -> AsyncIterator[Gateway]:
    """One of a group whose gateways never take another for silent, unless `peers` says so: this machine may be slow."""
    peers = PeersConfig(**{"servers": (url,), "name": name, "silent_s": 1000.0, **changes.pop("peers", {})})
    serving = await Serving.start(config(fakes, peers=peers, policy="preble", **changes))
    try:
        await eventually(lambda: len(serving.replicas) == len(fakes))
        yield Gateway(serving)
    finally:
        await serving.close()


@asynccontextmanager
async def group(fakes: list[FakeReplica], url: str, *names: str, **changes: Any) -> AsyncIterator[list[Gateway]]:
    """Gateways that have all heard each other."""
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(gateway(fakes, url, name, **changes)) for name in names]
        await eventually(lambda: all(len(one.group.peers) == len(names) - 1 for one in gateways))
        yield gateways


@pytest.fixture
async def fakes() -> AsyncIterator[list[FakeReplica]]:
    async with replicas(2) as started:
        yield started


async def test_what_one_gateway_places_counts_at_the_others_until_it_ends(fakes: list[FakeReplica]) -> None:
    with nats_server() as server:
        async with group(fakes, server.url, "a", "b", "c") as (a, b, c):
            placed = await a.place("one")
            await eventually(lambda: b.num_assumed == c.num_assumed == 1)
            assert a.num_assumed == 0
            promised_on = placed.placement.replica_id
            assert b.serving.scheduler.matched_tokens(promised_on, Request.of("probe", PROMPT)) == 384
            again = await b.place("two")
            placed.report(FirstToken())
            placed.report(Progress(5, 0))
            placed.end()
            again.cancelled()
            await eventually(lambda: a.num_assumed == b.num_assumed == c.num_assumed == 0)
            assert a.metric("preble_peers") == 2
            assert num_bad(b, "malformed") == num_bad(b, "unsigned") == 0


async def test_a_gateway_that_joins_late_is_told_what_is_in_flight_and_says_when_it_knows(
    fakes: list[FakeReplica],
) -> None:
    with nats_server() as server:
        async with group(fakes, server.url, "a", "b") as (a, b):
            placed = [await a.place("one"), await b.place("two"), await b.place("three")]
            async with gateway(fakes, server.url, "late") as late:
                await eventually(lambda: late.serving.waits_for is None)
                assert late.group.is_warm and len(late.group.peers) == 2
                await eventually(lambda: late.num_assumed == 3)
            for one in placed:
                one.cancelled()
            await eventually(lambda: a.group.peers == {b.group.me})


async def test_a_gateway_that_joins_late_knows_what_replicas_without_kv_events_have_computed(
    fakes: list[FakeReplica],
) -> None:
    with nats_server() as server:
        async with gateway(fakes, server.url, "a") as a:
            placed = await a.place("one")
            placed.report(Progress(5, 0))
            placed.end()
            async with gateway(fakes, server.url, "late") as late:
                await eventually(lambda: late.serving.waits_for is None)
                scheduler, probe = late.serving.scheduler, Request.of("probe", PROMPT)
                await eventually(lambda: scheduler.matched_tokens(placed.placement.replica_id, probe) == 384)


async def test_a_gateway_that_leaves_is_forgotten_at_once_with_its_requests(fakes: list[FakeReplica]) -> None:
    with nats_server() as server:
        async with group(fakes, server.url, "a", "b") as (a, _):
            async with gateway(fakes, server.url, "c") as c:
                await eventually(lambda: len(a.group.peers) == 2)
                await c.place("never ended")
                await eventually(lambda: a.num_assumed == 1)
            await eventually(lambda: a.num_assumed == 0 and len(a.group.peers) == 1)


async def test_without_nats_each_gateway_serves_alone_and_afterwards_they_agree_again(
    fakes: list[FakeReplica],
) -> None:
    with nats_server() as server:
        async with group(fakes, server.url, "a", "b", peers={"silent_s": 3.0}) as (a, b):
            before = await a.place("before")
            await eventually(lambda: b.num_assumed == 1)
            server.stop()
            await eventually(lambda: a.metric("preble_peers_connected") == b.metric("preble_peers_connected") == 0)
            await eventually(lambda: not a.group.peers and not b.group.peers)
            assert b.num_assumed == 0, "nothing is in flight for ever"
            during = await b.place("during")
            server.start()
            await eventually(lambda: a.num_assumed == b.num_assumed == 1)
            assert a.metric("preble_peers_connected") == 1
            before.cancelled()
            during.cancelled()
            await eventually(lambda: a.num_assumed == b.num_assumed == 0)


async def test_a_gateway_starts_without_nats_and_joins_when_it_comes(fakes: list[FakeReplica]) -> None:
    with nats_server() as server:
        server.stop()
        async with gateway(fakes, server.url, "a", peers={"warm_s": 0.5}) as a:
            await eventually(lambda: a.serving.waits_for is None)
            (await a.place("alone")).cancelled()
            assert a.metric("preble_peers_connected") == 0
            server.start()
            async with gateway(fakes, server.url, "b") as b:
                await eventually(lambda: a.group.peers == {b.group.me} and b.group.peers == {a.group.me})


async def test_groups_of_different_clusters_do_not_hear_each_other(fakes: list[FakeReplica]) -> None:
    with nats_server() as server:
        async with (
            group(fakes, server.url, "a", "b") as (a, _),
            gateway(fakes, server.url, "x", peers={"cluster": "x"}) as x,
        ):
            await eventually(lambda: x.serving.waits_for is None)  # it has listened for some beats, and heard nobody
            assert not x.group.peers and len(a.group.peers) == 1


PAGE = Path(__file__).parents[2] / "docs" / "howto" / "several-gateways.md"
KEYS = AuthConfig(api_keys=("alice",), admin_keys=("op",))
HOSTILE = [
    b"",
    b"\xff" * 1000,
    msgspec.msgpack.encode([VERSION + 1, "stranger", []]),
    msgspec.msgpack.encode([VERSION, [], msgspec.msgpack.encode(["stranger", 1, [["l"]]])]),
    msgspec.msgpack.encode([VERSION, [b"m" * 16], b"x" * 10_000]),
]
ODD = [
    ["p", 1, "no such replica", 100, 0, b"", b""],
    ["p", 2, "REPLICA", 2**40, 0, b"", b""],
    ["p", 3, "REPLICA", 100, 2**40, b"unknown", b""],
    ["p", 4, "REPLICA", 0, 0, b"", b""],
    ["r", 77, {"fact": "ended", "output_tokens": 2**40, "cached_tokens": 2**40}],
    ["r", 78, {"fact": "first_token"}],
    ["u", [b"", b"x"]],
    ["a", "a", list(range(1000))],
    ["t", b"unknown", b"1234"],
]


def certificate(cert: Path, key: Path) -> None:
    """Write a certificate for 127.0.0.1, and its key."""
    if (openssl := which("openssl")) is None:
        not_there("openssl is not installed here")
    made = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=nats"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(made, check=True, capture_output=True)


class Stranger:
    """A client of the group's NATS. `forged`: a packet that no gateway has sealed."""

    def __init__(self, client: nats.NATS) -> None:
        self._client = client

    async def publish(self, *packets: bytes) -> None:
        for packet in packets:
            await self._client.publish(f"preble.{VERSION}.default.gateways", packet)
        await self._client.flush()

    async def overhear(self, count: int) -> list[bytes]:
        """The next packets of gateways."""
        heard: list[bytes] = []

        async def hear(message: Any) -> None:
            heard.append(message.data)

        listening = await self._client.subscribe(f"preble.{VERSION}.default.gateways", cb=hear)
        await eventually(lambda: len(heard) >= count)
        await listening.unsubscribe()
        return heard


def forged(sender: str, *messages: Message) -> bytes:
    return join((b"m" * 16,), encode(PeerId(sender), 10**6, messages))


@asynccontextmanager
async def stranger(url: str) -> AsyncIterator[Stranger]:
    client = await nats.connect(url)
    yield Stranger(client)
    await client.close()


def num_bad(gateway: Gateway, reason: str) -> float:
    return gateway.metric(f'preble_peer_bad_packets_total{{reason="{reason}"}}')


async def test_packets_that_are_malformed_are_counted_and_harm_nobody(fakes: list[FakeReplica]) -> None:
    with nats_server() as server:
        async with group(fakes, server.url, "a", "b", auth=KEYS) as (a, b), stranger(server.url) as evil:
            await evil.publish(*HOSTILE)
            await eventually(lambda: num_bad(a, "malformed") + num_bad(a, "unsigned") == len(HOSTILE))
            placed = await b.place("after all that")
            await eventually(lambda: a.num_assumed == 1)
            placed.cancelled()


async def test_a_stranger_can_neither_speak_for_a_gateway_nor_say_again_what_one_has_said(
    fakes: list[FakeReplica],
) -> None:
    with nats_server() as server:
        async with group(fakes, server.url, "a", "b", auth=KEYS) as (a, b), stranger(server.url) as evil:
            old = await evil.overhear(3)
            lies = (Used((("alice", 10**9, 10**9),), (("alice", 1e6),)), Ejected(fakes[0].url), Left())
            await evil.publish(*(forged(name, lie) for name in ("evil", a.group.me, b.group.me) for lie in lies))
            await eventually(lambda: num_bad(a, "unsigned") == 9)
            assert a.group.peers == {b.group.me}
            assert a.serving.standing(ReplicaId(fakes[0].url)) is Standing.IN
            assert a.serving._turns.used_s("alice") == 0
            await evil.publish(*old)
            await eventually(lambda: num_bad(a, "replayed") == len(old))


async def test_a_member_whose_packets_are_odd_harms_nobody(fakes: list[FakeReplica]) -> None:
    """It has the key: a bug, or another program of the operator's."""
    with nats_server() as server:
        async with (
            group(fakes, server.url, "a", "b", auth=KEYS, peers={"silent_s": 3.0}) as (a, _),
            stranger(server.url) as odd,
        ):
            replica = fakes[0].url
            said = [[replica if part == "REPLICA" else part for part in message] for message in ODD]
            body = msgspec.msgpack.encode(["odd", 1, said])
            [key] = packet_keys(config(fakes, auth=KEYS))
            await odd.publish(join((digest(key, body, "sha256")[:16],), body))
            await eventually(lambda: "odd" in a.group.peers)
            await eventually(lambda: "odd" not in a.group.peers and len(a.group.peers) == 1)
            assert a.num_assumed == 0
            a.serving.scheduler.check()


async def test_gateways_with_other_keys_are_another_group_and_one_line_of_the_log_says_so(
    fakes: list[FakeReplica],
) -> None:
    others = AuthConfig(api_keys=("bob",))
    with nats_server() as server, structlog.testing.capture_logs() as log:
        async with (
            group(fakes, server.url, "a", "b", auth=KEYS) as (a, b),
            gateway(fakes, server.url, "x", auth=others, peers={"warm_s": 0.5}) as x,
        ):
            await eventually(lambda: num_bad(a, "unsigned") >= 3 and num_bad(x, "unsigned") >= 3)
            assert a.group.peers == {b.group.me} and not x.group.peers
            said = [line for line in log if line["event"] == "peers_bad_packet" and line["gateway"] == a.group.me]
            assert len(said) == 1 and "the same keys" in said[0]["error"]


async def test_keys_change_one_gateway_after_the_other_without_splitting_the_group(fakes: list[FakeReplica]) -> None:
    later = AuthConfig(api_keys=("alice", "bob"), admin_keys=("op",))
    with nats_server() as server:
        async with group(fakes, server.url, "a", "b", auth=KEYS) as (a, b):
            for one in (a, b):
                one.serving.reconfigure(msgspec.structs.replace(one.serving._config, auth=later))
                heard = a.group.num_heard, b.group.num_heard
                await eventually(lambda heard=heard: a.group.num_heard > heard[0] and b.group.num_heard > heard[1])
            async with gateway(fakes, server.url, "late", auth=later) as late:
                await eventually(lambda: late.group.peers == {a.group.me, b.group.me})
            assert num_bad(a, "unsigned") == num_bad(b, "unsigned") == 0


async def test_a_file_of_secrets_is_what_a_group_shares_where_it_is_given(
    fakes: list[FakeReplica], tmp_path: Path
) -> None:
    """Each line is one, so they are changed by adding a line everywhere, then removing the old one everywhere."""
    files = {"old": "a" * 32, "both": f"{'a' * 32}\n{'b' * 32}\n", "new": "b" * 32}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with nats_server() as server:
        async with AsyncExitStack() as stack:
            old, both, new = [
                await stack.enter_async_context(
                    gateway(fakes, server.url, name, peers={"secret_file": str(tmp_path / name), "warm_s": 0.5})
                )
                for name in files
            ]
            await eventually(lambda: both.group.peers == {old.group.me, new.group.me})
            await eventually(lambda: num_bad(old, "unsigned") > 0)
            assert old.group.peers == new.group.peers == {both.group.me}


@pytest.mark.parametrize("text", ["", "short\n", "x" * 32 + "\nshort", "\n".join("x" * 32 for _ in range(5))])
async def test_a_secret_that_is_none_is_refused_at_the_start(
    fakes: list[FakeReplica], tmp_path: Path, text: str
) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    with pytest.raises(ConfigError, match="holds no usable secret"):
        await Serving.start(config(fakes, peers=PeersConfig(("nats://127.0.0.1:9",), secret_file=str(file))))


async def test_only_who_has_the_password_belongs_to_the_group(fakes: list[FakeReplica]) -> None:
    secret = ("--user", "preble", "--pass", "secret")
    with nats_server(*secret) as server, structlog.testing.capture_logs() as log:
        trusted = server.url.replace("nats://", "nats://preble:secret@")
        async with (
            group(fakes, trusted, "a", "b") as (a, _),
            gateway(fakes, server.url, "stranger", peers={"warm_s": 0.5}) as stranger,
        ):
            await eventually(lambda: stranger.serving.waits_for is None)
            assert not stranger.group.is_connected and not stranger.group.peers
            assert len(a.group.peers) == 1
    warnings = [line for line in log if line["log_level"] == "warning"]
    told = [line["error"] for line in warnings if line["event"] == "peers_bus_error"]
    assert len([error for error in told if "Authorization" in error]) == 1, "why it is alone is told once"


CONFIGURED = re.search(r"```\n(# nats.conf.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


async def test_the_configuration_of_nats_on_the_page_lets_gateways_in_and_nothing_else(
    fakes: list[FakeReplica], tmp_path: Path
) -> None:
    certificate(tmp_path / "cert.pem", tmp_path / "key.pem")
    assert CONFIGURED is not None
    text = re.sub(r"listen: .*", "", CONFIGURED[1]).replace("/etc/nats", str(tmp_path))
    (tmp_path / "nats.conf").write_text(text)
    with nats_server("-c", str(tmp_path / "nats.conf")) as server:
        url = server.url.replace("nats://", "tls://preble:SECRET@")
        context = ssl.create_default_context(cafile=tmp_path / "cert.pem")
        refused: list[str] = []

        async def note(error: Exception) -> None:
            refused.append(str(error).lower())

        async with group(fakes, url, "a", "b", auth=KEYS, peers={"tls_ca": str(tmp_path / "cert.pem")}) as (a, _):
            assert num_bad(a, "unsigned") == 0
            with pytest.raises(nats.errors.NoServersError):
                await nats.connect(server.url.replace("nats:", "tls:"), tls=context, max_reconnect_attempts=1)
            preble = await nats.connect(url, tls=context, error_cb=note)
            await preble.publish("something.else", b"")
            await preble.subscribe(">")
            await preble.flush()
            await eventually(lambda: len(refused) == 2)
            assert all("permissions violation" in error for error in refused)
            await preble.close()


async def test_a_bus_with_tls_is_joined_only_by_its_certificate_authority(
    fakes: list[FakeReplica], tmp_path: Path
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate(cert, key)
    with nats_server("--tls", "--tlscert", str(cert), "--tlskey", str(key)) as server:
        url = server.url.replace("nats://", "tls://")
        async with (
            gateway(fakes, url, "a", peers={"tls_ca": str(cert)}) as a,
            gateway(fakes, url, "b", peers={"tls_ca": str(cert)}) as b,
            gateway(fakes, url, "stranger", peers={"warm_s": 0.5}) as stranger,
        ):
            await eventually(lambda: a.group.peers == {b.group.me} and b.group.peers == {a.group.me})
            await eventually(lambda: stranger.serving.waits_for is None)
            assert not stranger.group.is_connected


async def test_the_decision_log_says_which_gateway_decided(fakes: list[FakeReplica], tmp_path: Path) -> None:
    with nats_server() as server:
        logs = {name: tmp_path / f"{name}.jsonl" for name in "ab"}
        async with AsyncExitStack() as stack:
            a, b = [
                await stack.enter_async_context(
                    gateway(fakes, server.url, name, decisions=DecisionsConfig(log=str(logs[name])))
                )
                for name in "ab"
            ]
            await eventually(lambda: bool(a.group.peers and b.group.peers))
            placed = await a.place("one")
            await eventually(lambda: b.num_assumed == 1)
            placed.cancelled()
            await eventually(lambda: b.num_assumed == 0)
        lines = {name: [json.loads(line) for line in log.read_text().splitlines()] for name, log in logs.items()}
        assert [of_it[0]["gateway"] for of_it in lines.values()] == ["a", "b"]
        told = [line for line in lines["b"] if line.get("peer")]
        assert [line["kind"] for line in told[:2]] == ["peer_placed", "report"]
        assert told[1]["fact"] == {"fact": "ended", "output_tokens": 0} and told[1]["peer"] == a.group.me
        assert told[0]["peer"] == a.group.me and told[0]["prompt"]


async def test_a_replica_that_one_gateway_ejects_is_avoided_by_the_others(fakes: list[FakeReplica]) -> None:
    with nats_server() as server:
        async with group(fakes, server.url, "a", "b") as (a, b):
            bad = ReplicaId(fakes[0].url)
            ejection = a.serving._placements.ejection
            for number in range(10):
                ejection.sent(bad, RequestId(str(number)), 0.0)
                ejection.failed(bad, RequestId(str(number)), 0.0)
            assert a.serving.standing(bad) is Standing.EJECTED
            await eventually(lambda: b.serving.standing(bad) is not Standing.IN)


async def test_what_a_tenant_uses_at_one_gateway_counts_for_its_turn_at_the_others(fakes: list[FakeReplica]) -> None:
    with nats_server() as server:
        async with group(fakes, server.url, "a", "b") as (a, b):
            caller = Caller("key", "tenant", limits=KeyConfig("0" * 64, tokens_per_minute=1000))
            a.serving._turns.configure(QueueConfig(credit_s=1e9), max_waiting=10)  # time alone changes no counter
            before = {at: at.serving._turns.used_s("tenant") for at in (a, b)}
            placed = await a.place("one", caller)
            placed.report(Progress(50, 0))
            placed.end()
            used_s = a.serving._turns.used_s("tenant") - before[a]
            assert used_s > 0
            await eventually(lambda: b.serving._turns.used_s("tenant") - before[b] == pytest.approx(used_s))
            placed = await b.place("two", caller)
            placed.report(Progress(600, 0))
            placed.end()
            with pytest.raises(Overloaded):
                b.serving._key_limits.admit(caller, 1, asyncio.get_running_loop().time())


@pytest.mark.parametrize(
    ("peers", "why"),
    [
        ({"servers": ("http://a:1",)}, "is not a NATS URL"),
        ({"servers": ("nats://",)}, "is not a NATS URL"),
        ({"servers": ("nats://a:1",), "cluster": "a.b"}, "letters, digits"),
        ({"servers": ("tls://a:1",), "tls_ca": "/nowhere.pem"}, "tls_ca, tls_cert or tls_key"),
    ],
)
async def test_settings_that_cannot_be_are_refused(fakes: list[FakeReplica], peers: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        await Serving.start(config(fakes, peers=PeersConfig(**peers)))
