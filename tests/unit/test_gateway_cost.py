"""The benchmark of the gateway: what its kept result covers, and that its replica and load work."""

from __future__ import annotations

import asyncio
from types import ModuleType

import pytest

from preble.core.types import ReplicaId
from preble.engines.http import HttpClient
from preble.serving import COMPLETIONS
from support.scripts import script


@pytest.fixture(scope="module")
def gateway() -> ModuleType:
    return script("benchmarks/micro/gateway_cost.py")


def test_every_gateway_was_measured_in_every_case(gateway: ModuleType) -> None:
    performance = script("benchmarks/repro/performance.py")
    costs, added = performance.gateway_rows()
    assert gateway.arms_of(costs) == gateway.arms_of(added) == gateway.ARMS + gateway.ROUTER_ARMS
    kept = performance.known("gateway")
    assert kept["router"] and kept["smg"] and kept["core"] == "compiled"


def test_the_gateway_is_cheaper_than_the_routers_where_the_page_says_so(gateway: ModuleType) -> None:
    by = {
        (cost.arm, cost.case): cost.request_us for cost in script("benchmarks/repro/performance.py").gateway_rows()[0]
    }
    cheaper = [case for case in gateway.CASES if by[gateway.OURS, case] < by[gateway.THEIRS, case]]
    assert cheaper == [gateway.Case(gateway.SHORT, "text", 50, 512)]


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
