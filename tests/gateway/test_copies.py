"""Copies between emulated replicas, carried out by a gateway, and what happens when they fail."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from preble.config import AuthConfig, ParityConfig, ReplicaConfig
from preble.core.types import ReplicaId, TransferKind
from preble.decisions.recent import Decision
from preble.emulator import EmulatorConfig, EmulatorServer
from preble.emulator.kv.p2p_tier import KvSource, SharedId
from preble.engines import Engine
from preble.gateway.server import Gateway
from preble.profiles import load_profile, profile_json
from preble.serving import copies
from preble.serving.parity import check
from preble.serving.parity.report import Check, ParityOutcome
from preble.serving.placed import LocalPlaced
from support.gateways import gateway_before, idle
from support.linked import linked_profile
from support.waiting import PATIENCE_S, eventually

BLOCK = 16
PROMPT = list(range(1, 20 * BLOCK + 6))
WHOLE = 20 * BLOCK
SPEED = 20.0
ADMIN = AuthConfig(admin_keys=("root",))


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Of a replica on which a copy is far faster than computing."""
    return linked_profile(tmp_path, s_per_token=0.005, bytes_per_s=1e8, latency_s=0.005)


class Pair:
    """A gateway before two emulated replicas."""

    def __init__(self, servers: list[EmulatorServer], gateway: Gateway, http: aiohttp.ClientSession) -> None:
        self.servers = servers
        self.gateway = gateway
        self.http = http
        self.num_long = 0

    async def ask(self, prompt: Any = PROMPT, **more: object) -> tuple[str, dict[str, Any]]:
        """The replica, and its whole answer."""
        body = {"prompt": prompt, "max_tokens": 4, **more}
        async with self.http.post("/v1/completions", json=body) as answer:
            given = await answer.json()
            assert answer.status == 200, given
            return answer.headers["x-preble-replica"], given

    def server(self, url: str) -> EmulatorServer:
        return next(server for server in self.servers if server.url == url)

    def other(self, url: str) -> EmulatorServer:
        return next(server for server in self.servers if server.url != url)

    async def cached_at_one(self) -> str:
        """Have one replica cache the prompt, and wait until its events have said so; return which."""
        url, _ = await self.ask()
        await eventually(lambda: self.confirmed_tokens(url) >= WHOLE, "its events have come")
        return url

    def confirmed_tokens(self, url: str) -> int:
        """Return how many tokens a replica holds for certain: nothing else is copied from it."""
        cluster = self.gateway.serving.scheduler._cluster
        replica = cluster.replicas.replica(ReplicaId(url))
        return sum(entry.held for entry in cluster.index.caches[replica].entries.values())

    @asynccontextmanager
    async def busy(self, url: str) -> AsyncIterator[None]:
        """Keep a replica busy, so that the next request for the prompt is better off elsewhere."""
        others = [server.url for server in self.servers if server.url != url]
        self.gateway.serving.members.wanted.drain(others[0])
        self.gateway.serving.members.reconcile()
        self.num_long += 1
        start = 10_000 * self.num_long
        long = asyncio.create_task(self.ask(list(range(start, start + 6_000)), max_tokens=1))
        await eventually(lambda: self.gateway.serving.num_in_flight == 1, "the long prompt is placed")
        self.gateway.serving.members.wanted.undrain(others[0])
        self.gateway.serving.members.reconcile()
        try:
            yield
        finally:
            await long

    async def reset(self, url: str) -> None:
        """Have a replica forget what it caches, and wait until the scheduler knows."""
        assert await self.server(url).engine.reset_cache()
        scheduler = self.gateway.serving.scheduler
        await eventually(lambda: not scheduler.snapshot().replicas[url].cached_tokens, "its events have come")  # type: ignore[index]

    async def ask_while_busy(self, source: str, prompt: Any = PROMPT) -> tuple[str, dict[str, Any], Decision]:
        """As `ask`, while the source is busy; and what was decided."""
        async with self.busy(source):
            target, answer = await self.ask(prompt)
        newest = next(one for one in self.gateway.serving.recent.latest(5) if one.transfer is not None)
        return target, answer, newest

    def hold_copies_to(self, server: EmulatorServer) -> tuple[asyncio.Event, asyncio.Event]:
        """Have copies to a replica wait; returns what is set once one has begun, and what lets them come."""
        peers, asked, may_send = server.engine.peers, asyncio.Event(), asyncio.Event()
        assert peers is not None
        blocks = peers.blocks

        async def when_let(kv_source: KvSource) -> frozenset[int]:
            asked.set()
            await may_send.wait()
            return await blocks(kv_source)

        peers.blocks = when_let  # type: ignore[method-assign]
        return asked, may_send

    async def row(self, url: str) -> dict[str, Any]:
        """What `GET /replicas` says of a replica; nothing if it is gone."""
        async with self.http.get("/replicas") as answer:
            rows = (await answer.json())["replicas"]
        return next((row for row in rows if row["url"] == url), {})

    def num_copies(self, outcome: str) -> float:
        text = self.gateway.serving.telemetry.exposition().decode()
        found = re.findall(rf'preble_copies_total{{.*outcome="{outcome}".*}} (\S+)', text)
        return sum(map(float, found))


@asynccontextmanager
async def pair(
    profile: Path, parity: ParityConfig | None = None, *, joined: int = 2, **settings: Any
) -> AsyncIterator[Pair]:
    """`joined`: how many of the two are replicas of the gateway already."""
    async with AsyncExitStack() as stack:
        config = EmulatorConfig(
            profile=str(profile), speed=SPEED, events_port=0, block_size=BLOCK, kv_tokens=20_000, p2p=True
        )
        servers = [await stack.enter_async_context(EmulatorServer(config)) for _ in range(2)]
        replicas = [ReplicaConfig(server.url) for server in servers[:joined]]
        more = {"profile": str(profile), "parity": parity or ParityConfig(enabled=False), "auth": ADMIN, **settings}
        gateway = await stack.enter_async_context(gateway_before(replicas, **more))
        headers = {"authorization": "Bearer root"}
        http = await stack.enter_async_context(aiohttp.ClientSession(gateway.url, headers=headers))
        yield Pair(servers, gateway, http)
        await idle(gateway)


async def test_a_prefix_is_copied_to_a_replica_with_less_to_do(profile: Path) -> None:
    async with pair(profile) as two:
        source = await two.cached_at_one()
        target, answer, decision = await two.ask_while_busy(source)
        assert target == two.other(source).url
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == WHOLE
        engine = two.server(target).engine
        assert engine.copied_tokens == engine.reused_copied_tokens == engine.reused_tokens == WHOLE
        assert decision.transfer is not None and (decision.transfer.source, decision.transfer.tokens) == (source, WHOLE)
        assert decision.transferred_s is not None and not decision.transfer_failed
        assert (two.num_copies("ok"), two.num_copies("failed")) == (1, 0)


async def test_a_list_of_prompts_can_be_copied_for(profile: Path) -> None:
    async with pair(profile) as two:
        source = await two.cached_at_one()
        async with two.busy(source):
            _, answer = await two.ask([PROMPT, [*PROMPT, 7]])
        assert len(answer["choices"]) == 2
        assert two.num_copies("ok") == 1  # and the engine lives: a list under one id would have ended it


async def test_a_dead_source_costs_its_request_nothing_and_then_nobody_waits(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy fails at once, and leaves its target deaf, as it does a vLLM: the next ones wait in vain."""
    monkeypatch.setattr(copies, "LEAST_WAIT_S", 0.1)  # ships 1 s
    async with pair(profile) as two:
        source = await two.cached_at_one()
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # and does not listen
            two.gateway.serving.replicas[source].engine.kv_peer = f"127.0.0.1:{nobody.getsockname()[1]}"  # type: ignore[index]
            for number in range(copies.MOST_FAILURES):
                prompt = [*PROMPT[: WHOLE - BLOCK * number], 9, 9]
                target, _, decision = await two.ask_while_busy(source, prompt)
                assert decision.transfer_failed
                await two.reset(target)
        assert two.server(target).engine.peers.is_deaf  # type: ignore[union-attr]
        assert two.num_copies("failed") == copies.MOST_FAILURES
        async with two.busy(source):
            await two.ask()
        assert two.num_copies("failed") == copies.MOST_FAILURES  # the target is left out now


async def test_copies_that_fail_together_count_once(profile: Path) -> None:
    """As those do that wait for a first connection between two replicas."""
    async with pair(profile) as two:
        source, target = two.gateway.serving.replicas.values()
        began = asyncio.get_running_loop().time()
        for _ in range(copies.MOST_FAILURES):
            two.gateway.serving._placements.copies._failed(source, target, began, "it took too long")
        assert (source.failed_copies, target.failed_copies) == (1, 1)


async def test_a_client_that_leaves_during_a_copy_leaves_nothing_behind(profile: Path) -> None:
    async with pair(profile) as two:
        source = await two.cached_at_one()
        two.other(source).engine.peers.is_deaf = True  # type: ignore[union-attr]
        async with two.busy(source):
            asking = asyncio.create_task(two.ask())
            await eventually(lambda: two.gateway.serving.num_in_flight == 2, "it waits for its copy")
            asking.cancel()
            await eventually(lambda: two.gateway.serving.num_in_flight == 1, "it has ended")
        assert two.num_copies("ok") == two.num_copies("failed") == 0


async def test_the_sessions_of_a_drained_replica_are_copied_from_it_and_only_then_may_it_go(profile: Path) -> None:
    async with pair(profile) as two:
        source = await two.cached_at_one()
        asked, may_send = two.hold_copies_to(two.other(source))
        async with two.http.post("/replicas/drain", params={"url": source}) as answer:
            assert answer.status == 200
        assert (await two.row(source))["safe_to_remove"]
        asking = asyncio.create_task(two.ask())
        await asked.wait()
        row = await two.row(source)
        assert (row["state"], row["running"], row["safe_to_remove"]) == ("draining", 1, False)
        async with two.http.delete("/replicas", params={"url": source}) as answer:
            assert answer.status == 202, "it leaves once the copy from it has ended"
        may_send.set()
        target, answer_of_target = await asking
        assert target == two.other(source).url
        assert answer_of_target["usage"]["prompt_tokens_details"]["cached_tokens"] == WHOLE
        await eventually(lambda: source not in two.gateway.serving.replicas, "it has left")
        assert (two.num_copies("ok"), two.num_copies("failed")) == (1, 0)


async def test_what_a_follower_has_computed_before_the_copy_came_does_not_count_as_copied(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "LEAST_WAIT_S", PATIENCE_S)  # shipped: 1 s, in which the follower must be answered
    async with pair(profile) as two:
        source = await two.cached_at_one()
        asked, may_send = two.hold_copies_to(two.other(source))
        async with two.http.post("/replicas/drain", params={"url": source}):
            first = asyncio.create_task(two.ask())
        await asked.wait()
        target, follower = await two.ask()
        assert (target, follower["usage"]["prompt_tokens_details"]["cached_tokens"]) == (two.other(source).url, 0)
        may_send.set()
        _, answer = await first
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == WHOLE
        assert (two.num_copies("overtaken"), two.num_copies("ok"), two.num_copies("failed")) == (1, 0, 0)
        assert two.other(source).engine.copied_tokens == 0
        assert b"preble_copied_tokens_total{" not in two.gateway.serving.telemetry.exposition()


async def test_a_split_is_not_carried_out_and_nobody_is_blamed(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an adapter of the user's own may ask for one."""
    carried_out = copies.Copies.carry_out

    async def as_a_split(self: copies.Copies, placed: LocalPlaced) -> LocalPlaced:
        if (transfer := placed.placement.transfer) is not None:
            split = replace(transfer, kind=TransferKind.PREFILL)
            placed.placement = replace(placed.placement, transfer=split)
        return await carried_out(self, placed)

    monkeypatch.setattr(copies.Copies, "carry_out", as_a_split)
    async with pair(profile) as two:
        source = await two.cached_at_one()
        target, answer, decision = await two.ask_while_busy(source)
        assert (target, answer["usage"]["prompt_tokens_details"]["cached_tokens"]) == (two.other(source).url, 0)
        assert two.other(source).engine.copied_tokens == 0
        assert decision.transfer_failed
        assert all(replica.failed_copies == 0 for replica in two.gateway.serving.replicas.values())


async def test_a_replica_that_joins_copies_what_is_hot(profile: Path) -> None:
    async with pair(profile, joined=1) as two:
        source, new = [server.url for server in two.servers]
        await two.cached_at_one()
        async with two.http.post("/replicas", json={"url": new}) as answer:
            assert answer.status == 201
        await eventually(lambda: new in two.gateway.serving.replicas, "it has joined")
        target, answer_of_new, decision = await two.ask_while_busy(source)
        assert target == new
        assert answer_of_new["usage"]["prompt_tokens_details"]["cached_tokens"] == WHOLE
        assert decision.transfer is not None and decision.transfer.source == source


async def test_without_a_link_in_the_profile_nobody_looks_for_copies(tmp_path: Path) -> None:
    file = tmp_path / "plain.json"
    file.write_text(profile_json(load_profile("tiny-cpu")))
    async with pair(file) as two:
        assert not two.gateway.serving.scheduler._cluster.links.groups


async def test_copies_are_made_only_after_one_was_seen_to_be_right(profile: Path) -> None:
    async with pair(profile, ParityConfig()) as two:
        links = two.gateway.serving.scheduler._cluster.links
        await eventually(lambda: links.groups, "both may copy")
        [report] = [one for one in await two.gateway.serving.check_parity() if one.findings[-1].check is Check.COPY][:1]
        assert report.findings[-1].outcome is ParityOutcome.VERIFIED


async def test_a_replica_that_answers_otherwise_after_a_copy_makes_none(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(profile, ParityConfig()) as two:
        links = two.gateway.serving.scheduler._cluster.links
        await eventually(lambda: links.groups, "both may copy")
        wrong, right = two.servers[0].url, check.completed

        async def completed(engine: Engine, body: bytes) -> bytes:
            answer = await right(engine, body)
            return answer.replace(b'"text":"', b'"text":"?') if engine.url == wrong else answer

        monkeypatch.setattr(check, "completed", completed)
        reports = await two.gateway.serving.check_parity()
        assert any(report.findings[-1].outcome is ParityOutcome.MISMATCH for report in reports)
        assert all(members.bit_count() < 2 for members in links.groups.values())


async def test_two_prompts_under_one_id_end_an_emulated_engine() -> None:
    """As vLLM 0.32 ends (docs/reference/engine-facts.md), so that a gateway that does it is found out."""
    config = EmulatorConfig(profile="tiny-cpu", p2p=True, block_size=BLOCK)
    source = {"kv_request_id": "one", "remote_host": "127.0.0.1", "remote_port": 1}
    body = {"prompt": [PROMPT, PROMPT[1:]], "max_tokens": 1, "kv_transfer_params": {"remote_kv_source": source}}
    with pytest.raises(SharedId):
        async with EmulatorServer(config) as server, aiohttp.ClientSession(server.url) as http:
            async with http.post("/v1/completions", json=body) as answer:
                assert answer.status == 400
            await server.failed()


async def test_where_first_tokens_are_late_a_copy_has_as_long_as_they_need(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "LEAST_WAIT_S", 0.0)  # ships 1 s
    monkeypatch.setattr(copies, "PATIENCE", 0.0)  # ships 4
    async with pair(profile) as two:
        source = await two.cached_at_one()
        target, _, decision = await two.ask_while_busy(source)
        assert decision.transfer_failed
        await two.reset(target)
        for _ in range(100):
            two.gateway.serving.scheduler._promises.ttft.note(0.0, PATIENCE_S)
        _, _, decision = await two.ask_while_busy(source)
        assert decision.transfer_failed is False and decision.transferred_s is not None
