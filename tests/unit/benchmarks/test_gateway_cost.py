"""The benchmark of the gateway: what its kept result covers, and that its replica and load work."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from preble.core.types import BlocksStored, KvEvent, ReplicaId, unpack_tokens
from preble.engines.http import HttpClient
from preble.engines.vllm.client import VllmEngine
from preble.prompts.endpoints import COMPLETIONS
from support.kv_changes import changes_of
from support.scripts import script
from support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def gateway() -> ModuleType:
    return script("benchmarks/micro/gateway_cost.py")


def test_every_gateway_was_measured_in_every_case(gateway: ModuleType) -> None:
    performance = script("benchmarks/repro/performance.py")
    costs, added = performance.gateway_rows()
    assert gateway.arms_of(costs) == gateway.arms_of(added)
    assert {gateway.OURS, gateway.THEIRS, gateway.SHEPHERD} <= set(gateway.arms_of(costs))
    assert {(cost.arm, cost.case) for cost in costs} == set(product(gateway.arms_of(costs), gateway.CASES))
    kept = performance.known("gateway")
    assert kept["router"] and kept["smg"] and kept["core"] == "compiled"


def test_the_command_smg_of_sglang_router_is_not_measured_as_smg(gateway: ModuleType, tmp_path: Path) -> None:
    for name, says in (("smg", "smg 1.13.0"), ("other", "sgl-model-gateway 0.3.2")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {says}\n")
        (tmp_path / name).chmod(0o755)
    assert gateway.versions(None, tmp_path / "smg")[gateway.SMG] == "smg 1.13.0"
    with pytest.raises(SystemExit, match="not SMG; install the package smg"):
        gateway.versions(None, tmp_path / "other")


@pytest.mark.parametrize("limit", [20.0, 95.0, 200.0, 777.0, 6000.0])
async def test_the_search_finds_the_largest_rate_that_is_borne(limit: float) -> None:
    rate = script("benchmarks/micro/gateway_rate.py")

    async def tried(rps: float) -> Any:
        return rate.Trial(rps, 1.0, 1.0, 0.0, 1.0, is_borne=rps <= limit)

    trials = await rate.searched(tried)
    borne = max(trial.rate for trial in trials if trial.is_borne)
    assert limit / rate.PRECISION <= borne <= limit
    assert len(trials) < 16


async def test_the_search_ends_where_every_rate_is_borne_and_where_none_is() -> None:
    rate = script("benchmarks/micro/gateway_rate.py")
    for is_borne in (True, False):
        trials = await rate.searched(lambda rps, is_borne=is_borne: _trial(rate, rps, is_borne))
        assert {trial.is_borne for trial in trials} == {is_borne} and len(trials) < 10


async def _trial(rate: ModuleType, rps: float, is_borne: bool) -> Any:
    return rate.Trial(rps, 1.0, 1.0, 0.0, 1.0, is_borne)


async def test_an_open_loop_counts_from_when_a_request_was_due(gateway: ModuleType) -> None:
    rate = script("benchmarks/micro/gateway_rate.py")
    server = await asyncio.get_running_loop().create_server(gateway.upstream.Connection, "127.0.0.1", 0)
    client = rate.Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        asked = gateway.question([], form="ids", events=0, natively=False)
        taken_s, late_s = await client.ask([asked] * 3, [-2.0, -1.0, 0.0])
        assert sorted(int(seconds) for seconds in taken_s) == sorted(int(seconds) for seconds in late_s) == [0, 1, 2]
    finally:
        client.close()
        server.close()


def test_each_client_of_a_closed_loop_sends_its_next_request_after_its_answer() -> None:
    cluster = script("benchmarks/micro/gateway_cluster.py")
    for case in cluster.CASES:
        requests = case.workload(0, 3 * case.at_once).requests
        parents = [request.parent for request in requests]
        assert parents[: case.at_once] == [None] * case.at_once
        assert parents[case.at_once :] == [request.request_id for request in requests[: -case.at_once]]
        assert all(isinstance(request.prompt(), str) for request in requests)  # what routers compare


def test_most_requests_of_the_hot_prefix_share_one() -> None:
    cluster = script("benchmarks/micro/gateway_cluster.py")
    case = next(case for case in cluster.CASES if case.name == "hot prefix")
    tools = Counter(request.group for request in case.workload(0, 400).requests)
    assert tools.most_common(1)[0][1] > 200


def test_the_table_of_the_cluster_has_means_over_the_rounds() -> None:
    cluster = script("benchmarks/micro/gateway_cluster.py")
    runs = [
        cluster.Run("documents", cluster.DEFAULT, 1, hits, 1.1, 0.1, 1.0, 0.2, 2.0, 40.0, 1.0) for hits in (0.4, 0.6)
    ]
    assert cluster.rows_of(runs) == [
        ("documents", "preble preble, 1 worker", "0.500", "1.10", "100", "1000", "200", "2000", "40.0", "2")
    ]


async def once_stored(events: AsyncIterator[KvEvent]) -> AsyncIterator[KvEvent]:
    """Up to the first blocks that are stored."""
    async for event in events:
        yield event
        if isinstance(event, BlocksStored):
            return


@pytest.mark.slow
async def test_the_replica_of_the_gateways_benchmark_publishes_what_it_caches(
    gateway: ModuleType, tmp_path: Path
) -> None:
    prompts, cached = import_module("gateway_parts.prompts"), import_module("gateway_parts.cache")
    drawn = prompts.Prompts(prompts.train_tokenizer(tmp_path), 0).draw(200)
    cache = cached.PublishedCache(cached.PromptTokenizer(tmp_path))
    publishing = asyncio.create_task(cache.publish())
    server = await asyncio.get_running_loop().create_server(lambda: gateway.upstream.Connection(cache), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    http, connection = HttpClient(url, ReplicaId("upstream")), await gateway.connected(url)
    engine = VllmEngine(http)
    try:
        assert (await engine.probe()).spec.reports_events
        events = changes_of(engine.follow_kv_events)
        await connection.ask(gateway.question(drawn, form="text", events=0, natively=False))
        async with asyncio.timeout(PATIENCE_S):
            stored = [event async for event in once_stored(events)]
        ids = [token for line in drawn for token in line.ids]
        assert list(unpack_tokens(stored[-1].tokens)) == ids[: len(ids) // 16 * 16]
        await connection.ask(gateway.question(drawn, form="text", events=40, natively=False))
        async with asyncio.timeout(20):
            answered = [[event async for event in once_stored(events)][-1] for _ in range(2)]
        assert [len(unpack_tokens(event.tokens)) for event in answered] == [16, 16], "a block for 16 tokens"
        assert answered[0].parent == stored[-1].block_hashes[-1]
    finally:
        publishing.cancel()
        await engine.close()
        connection.close()
        server.close()


@pytest.mark.slow
async def test_the_replica_of_the_gateways_benchmark_stores_and_evicts_in_steps(
    gateway: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = import_module("gateway_parts.cache")
    monkeypatch.setattr(cached, "NUM_BLOCKS", 1_000)  # the benchmark has 31,250
    import_module("gateway_parts.prompts").train_tokenizer(tmp_path)
    cache = cached.PublishedCache(cached.PromptTokenizer(tmp_path))
    for first in (0, 50_000):
        cache.end(cache.take(range(first, first + 12_000), b""))
    found = []
    while cache._due:
        cache._step()
        found.append([(type(event).__name__, len(event.block_hashes)) for event in cache._cache.take_events()])
    assert found == [
        [("BlocksStored", 512)],
        [("BlocksStored", 238), ("BlocksEvicted", 24), ("BlocksStored", 274)],
        [("BlocksEvicted", 476), ("BlocksStored", 476)],
    ]
    cache._publisher.close()


async def test_the_replica_of_the_gateways_benchmark_answers_with_the_events_that_are_asked_for(
    gateway: ModuleType,
) -> None:
    server = await asyncio.get_running_loop().create_server(gateway.upstream.Connection, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    connection, http = await gateway.connected(url), HttpClient(url, ReplicaId("upstream"))
    try:
        for natively in (False, True):
            question = gateway.question([], form="ids", events=3, natively=natively)
            meter = COMPLETIONS.meter()
            async with http.send(question.path, question.body, {}) as response:
                async for chunk in response.chunks():
                    meter.feed(chunk)
            assert meter.tokens() == (3, None)
            times = await connection.ask(question)
            assert 0 < times.first_byte_s <= times.end_s
        with pytest.raises(RuntimeError, match="404"):
            await connection.ask(gateway.Question("/elsewhere", b"{}", is_streamed=False))
    finally:
        await http.close()
        connection.close()
        server.close()
        await server.wait_closed()
