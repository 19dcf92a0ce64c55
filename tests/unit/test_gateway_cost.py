"""The benchmark of the gateway: its replica and load do what they say, and docs/performance.md tells its results."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from preble.core.types import ReplicaId
from preble.engines.http import HttpClient
from preble.serving.sse import StreamMeter

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gateway() -> Iterator[ModuleType]:
    """The script, under another name: the tests have a folder of its own."""
    file = ROOT / "benchmarks/micro/gateway.py"
    spec = importlib.util.spec_from_file_location("gateway_benchmark", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(file.parent)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((ROOT / "benchmarks/results/gateway.json").read_text())
    return kept


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs/performance.md").read_text(encoding="utf-8")


def test_the_tables_are_what_the_benchmark_printed(gateway: ModuleType, result: dict[str, Any], page: str) -> None:
    costs = msgspec.convert(result["costs"], list[gateway.Cost])
    added = msgspec.convert(result["added"], list[gateway.Added])
    assert gateway.cost_table(costs) in page
    assert gateway.added_table(added) in page
    assert gateway.arms_of(costs) == gateway.arms_of(added) == gateway.ARMS + gateway.ROUTER_ARMS
    assert result["router"] in page and result["core"] == "compiled"


def test_what_is_said_of_the_costs_is_what_was_measured(gateway: ModuleType, result: dict[str, Any], page: str) -> None:
    costs = msgspec.convert(result["costs"], list[gateway.Cost])
    by = {(cost.arm, cost.case): cost.request_us for cost in costs}
    (ours, preble, quiet), (theirs, cache_aware) = gateway.ARMS, gateway.ROUTER_ARMS
    small = gateway.Case(100, False, 0)

    def ratios(*, as_ids: bool, events: int) -> str:
        cases = [gateway.Case(tokens, as_ids, events) for tokens in gateway.LENGTHS]
        times = [by[ours, case] / by[theirs, case] for case in cases]
        return " to ".join(dict.fromkeys(f"{of(times):.1f}" for of in (min, max)))

    def full_per_s(arm: object) -> str:
        few = by[arm, gateway.Case(2000, False, gateway.EVENTS)]
        return f"{1e6 / (few + (200 - gateway.EVENTS) * gateway.event_us(by, arm)):.0f}"

    whole, events = {"events": 0}, {"events": gateway.EVENTS}
    event_ratios = [
        gateway.event_us(by, a) / gateway.event_us(by, b) for a, b in ((ours, theirs), (preble, cache_aware))
    ]
    whole_per_s = [1e6 / by[arm, gateway.Case(2000, False, 0)] for arm in (preble, cache_aware)]
    text = " ".join(page.split())
    for said in (
        f"text costs us {ratios(as_ids=False, **whole)} times as much CPU with whole answers",
        f"and {ratios(as_ids=False, **events)} times with 16 events",
        f"ids {ratios(as_ids=True, **whole)} and {ratios(as_ids=True, **events)} times",
        "costs {:.1f} times as much, and {:.1f} times with `preble`".format(*event_ratios),
        "{:,.0f} requests a second fill the core of our gateway (`preble`), {:,.0f} each core".format(*whole_per_s),
        f"log lines a request take {1 - by[quiet, small] / by[preble, small]:.0%}".replace("%", " %"),
        f"fill ours at {full_per_s(preble)} requests a second",
        f"each core of sglang-router at {full_per_s(cache_aware)}",
    ):
        assert said in text
    for own, other in ((ours, theirs), (preble, cache_aware)):
        assert [case for case in gateway.CASES if by[own, case] < by[other, case]] == [gateway.Case(8000, True, 0)]


async def test_the_replica_of_the_gateways_benchmark_answers_with_the_events_that_are_asked_for(
    gateway: ModuleType,
) -> None:
    server = await asyncio.get_running_loop().create_server(gateway.upstream.Connection, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    connection, http = await gateway.connected(url), HttpClient(url, ReplicaId("upstream"))
    try:
        for natively in (False, True):
            question = gateway.question([], as_ids=True, events=3, natively=natively)
            meter = StreamMeter()
            async with http.send(question.path, question.body, {}) as response:
                async for chunk in response.chunks():
                    meter.feed(chunk)
            assert meter.output_tokens() == 3
            times = await connection.ask(question)
            assert 0 < times.first_byte_s <= times.end_s
        with pytest.raises(RuntimeError, match="404"):
            await connection.ask(gateway.Question("/elsewhere", b"{}", is_streamed=False))
    finally:
        await http.close()
        connection.close()
        server.close()
        await server.wait_closed()
