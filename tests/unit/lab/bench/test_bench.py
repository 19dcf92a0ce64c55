"""The load generator against scripted endpoints on real sockets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from preble.errors import ConfigError
from preble.lab.bench import BenchRun, BenchSettings
from preble.lab.bench.client import BenchClient
from preble.lab.bench.completion_stream import server_sent_data
from preble.lab.bench.counters import CacheCounters, parse_counters
from preble.lab.bench.load import run_load
from preble.lab.bench.plot import draw_results
from preble.lab.bench.report import print_results
from preble.lab.metrics import RequestRecord, Slo, summarize
from preble.lab.metrics.itl import itl
from preble.lab.workloads import Segment, Workload, WorkloadPlan, WorkloadRequest
from support.waiting import PATIENCE_S

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CHUNK = {"choices": [{"index": 0, "text": "x"}]}
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
}
METRICS = """\
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0"} %d
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0"} %d
"""


async def stream(request: web.Request, *events: dict[str, Any], done: bool = True) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-preble-replica": "r0"})
    await response.prepare(request)
    for event in events:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    if done:
        await response.write(b"data: [DONE]\n\n")
    return response


async def answer(request: web.Request) -> web.StreamResponse:
    return await stream(request, CHUNK, CHUNK, USAGE)


@asynccontextmanager
async def endpoint(handler: Handler = answer, models: Any = None) -> AsyncIterator[str]:
    """An endpoint that answers completions with `handler`; its cache counters grow at each look."""
    looks = iter(range(1, 100))

    async def list_models(request: web.Request) -> web.Response:
        return web.json_response(models or {"data": [{"id": "m"}]})

    async def metrics(request: web.Request) -> web.Response:
        look = next(looks)
        return web.Response(text=METRICS % (1000 * look, 250 * look))

    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


def request(request_id: str, arrival_s: float | None = 0.0, parent: str | None = None) -> WorkloadRequest:
    return WorkloadRequest(request_id, (Segment(text="p"),), 2, arrival_s=arrival_s, session="s", parent=parent)


async def run(url: str, *requests: WorkloadRequest, **client: Any) -> dict[str, RequestRecord]:
    records: dict[str, RequestRecord] = {}
    async with BenchClient(url, **client) as sender:
        await sender.find_model()
        await run_load(sender, Workload("w", requests), lambda r: records.setdefault(r.request_id, r) and None)
    return records


async def test_a_record_has_what_the_answer_said() -> None:
    async with endpoint() as url:
        record = (await run(url, request("a")))["a"]
    assert (record.status, record.error, record.replica) == (200, None, "r0")
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (10, 2, 4)
    assert record.first_token_s is not None
    assert record.scheduled_s <= record.sent_s <= record.first_token_s <= record.end_s


async def test_the_first_token_is_not_the_first_byte() -> None:
    """A role-only or empty head without choices is no token."""

    async def no_tokens(request: web.Request) -> web.StreamResponse:
        return await stream(request, {"choices": []})

    async with endpoint(no_tokens) as url:
        record = (await run(url, request("a")))["a"]
    assert record.ok
    assert record.first_token_s is None


async def test_without_usage_the_events_are_counted() -> None:
    async def no_usage(request: web.Request) -> web.StreamResponse:
        return await stream(request, CHUNK, CHUNK, CHUNK)

    async with endpoint(no_usage) as url:
        record = (await run(url, request("a")))["a"]
    assert (record.output_tokens, record.cached_tokens) == (3, None)


async def test_the_gaps_between_the_events_of_a_stream_are_measured() -> None:
    """The stream goes on when the client has the first token, and some of the gap has passed."""
    gap_s = 0.05

    async def slow(request: web.Request) -> web.StreamResponse:
        response = await stream(request, CHUNK, done=False)
        await asyncio.sleep(gap_s)
        for event in (CHUNK, CHUNK, USAGE):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async with endpoint(slow) as url:
        record = (await run(url, request("a")))["a"]
    assert sum(record.gaps.values()) == 2, "three tokens have two gaps"
    found = itl([record.gaps])
    assert found is not None and found.p999_s >= 0.9 * gap_s
    assert summarize([record]).itl == found


async def test_the_body_asks_for_the_workloads_prompt_and_length() -> None:
    bodies = []

    async def remember(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await answer(request)

    async with endpoint(remember) as url:
        await run(url, request("a"))
        await run(url, request("a"), ignore_eos=False)
    assert bodies[0] == {
        "model": "m",
        "prompt": "p",
        "max_tokens": 2,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert "ignore_eos" not in bodies[1]


async def refuse(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no"}}, status=503)


async def break_off(request: web.Request) -> web.StreamResponse:
    return await stream(request, CHUNK, done=False)


async def fail_midway(request: web.Request) -> web.StreamResponse:
    return await stream(request, CHUNK, {"error": {"code": "engine_gone", "message": "gone"}}, done=False)


async def rubbish(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"data: {]\n\n")


async def hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize(
    ("handler", "kind"),
    [
        (refuse, "status 503"),
        (break_off, "answer cut off"),
        (fail_midway, "error engine_gone"),
        (rubbish, "answer not understood"),
        (hang_up, "connection: ServerDisconnectedError"),
    ],
)
async def test_a_failed_request_is_recorded_with_its_kind(handler: Handler, kind: str) -> None:
    async with endpoint(handler) as url:
        assert (await run(url, request("a")))["a"].error == kind


async def test_a_request_that_takes_too_long_is_recorded_as_a_timeout() -> None:
    never = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        await never.wait()
        return web.Response()

    async with endpoint(hang) as url:
        record = (await run(url, request("a"), timeout_s=0.2))["a"]
        never.set()
    assert record.error == "timeout"


async def test_requests_are_sent_at_their_time_whatever_becomes_of_the_others() -> None:
    """The first answer waits for the third request: a closed loop would never get there."""
    all_here, arrived = asyncio.Event(), 0

    async def wait_for_three(request: web.Request) -> web.StreamResponse:
        nonlocal arrived
        arrived += 1
        if arrived == 3:
            all_here.set()
        await all_here.wait()
        return await answer(request)

    async with endpoint(wait_for_three) as url, asyncio.timeout(PATIENCE_S):
        records = await run(url, request("a"), request("b", 0.01), request("c", 0.02))
    assert [record.ok for record in records.values()] == [True, True, True]
    assert [records[name].scheduled_s for name in "abc"] == [0.0, 0.01, 0.02]
    assert all(record.sent_s >= record.scheduled_s for record in records.values())


async def test_a_child_is_sent_after_its_parent_was_answered() -> None:
    async with endpoint() as url:
        records = await run(url, request("a"), request("b", None, parent="a"), request("c", None, parent="b"))
    assert records["a"].end_s <= records["b"].scheduled_s <= records["b"].sent_s
    assert records["b"].end_s <= records["c"].scheduled_s


async def test_what_waits_for_a_failed_parent_fails_unsent() -> None:
    async with endpoint(refuse) as url:
        records = await run(url, request("a"), request("b", None, parent="a"), request("c", None, parent="b"))
    assert {name: record.error for name, record in records.items()} == {
        "a": "status 503",
        "b": "parent failed",
        "c": "parent failed",
    }


async def test_an_endpoint_that_is_not_there_is_said_so() -> None:
    async with BenchClient("http://127.0.0.1:1") as client:
        with pytest.raises(ConfigError, match=r"nothing answers at http://127.0.0.1:1: .*; is it running\?"):
            await client.find_model()


async def test_an_endpoint_that_wants_a_key_is_said_so() -> None:
    async def refuse_keyless(_: web.Request) -> web.Response:
        raise web.HTTPUnauthorized

    app = web.Application()
    app.router.add_get("/v1/models", refuse_keyless)
    async with TestServer(app) as server, BenchClient(str(server.make_url("")).rstrip("/")) as client:
        with pytest.raises(ConfigError, match="give --api-key"):
            await client.find_model()


@pytest.mark.parametrize(
    ("models", "model", "says"),
    [
        ({"object": "list"}, None, "does not answer as an OpenAI endpoint"),
        ({"data": [], "object": "list"}, None, "serves no model now"),
        ({"data": [{"id": "m"}]}, "other", "does not serve 'other'; it serves m"),
    ],
)
async def test_an_endpoint_that_does_not_fit_is_said_so(models: Any, model: str | None, says: str) -> None:
    async with endpoint(models=models) as url, BenchClient(url, model=model) as client:
        with pytest.raises(ConfigError, match=says):
            await client.find_model()


async def test_events_are_found_whatever_pieces_they_arrive_in() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (
            b": comment\n\nda",
            b"ta: one\n",
            b"\ndata:two\r\n\r\nevent: x\ndata: three\n\n",
            b"data: never ended",
        ):
            yield piece

    assert [data async for data in server_sent_data(pieces())] == [b"one", b"two", b"three"]


def test_counters_are_summed_over_an_engines_ranks() -> None:
    page = METRICS % (100, 40) + 'vllm:prefix_cache_queries_total{engine="1"} 50\n'
    assert parse_counters("u", page) == CacheCounters(150, 40)


@pytest.mark.parametrize("page", ["", "up 1\n", "{{{{\n"])
def test_a_page_without_counters_is_refused(page: str) -> None:
    with pytest.raises(ConfigError, match="u/metrics"):
        parse_counters("u", page)


def settings(url: str = "http://x", **changes: Any) -> BenchSettings:
    return BenchSettings(url=url, plan=WorkloadPlan(source="tool_use", requests=6, rps=200.0, seed=3), **changes)


def test_a_rate_is_needed_where_the_workload_has_no_times() -> None:
    with pytest.raises(ConfigError, match="give a rate"):
        BenchRun(BenchSettings(url="http://x", plan=WorkloadPlan(source="tool_use", requests=6)))


async def test_a_run_has_the_engines_own_counters_and_its_settings() -> None:
    async with endpoint() as url:
        asked = settings(url, replicas=(url,), slo=Slo(ttft_s=60.0))
        bench = BenchRun(asked)
        await bench.run()
    result = bench.result()
    assert result.engines == {url: CacheCounters(1000, 250)}
    assert (result.settings, result.partial, result.summary.requests, result.summary.errors) == (asked, False, 6, 0)
    assert result.summary.hit_rate == 0.4
    assert result.summary.goodput_per_s == result.summary.requests_per_s


async def test_an_interrupted_run_reports_what_had_ended_as_partial() -> None:
    never = asyncio.Event()
    answered = 0

    async def answer_two(request: web.Request) -> web.StreamResponse:
        nonlocal answered
        answered += 1
        if answered > 2:
            await never.wait()
        return await answer(request)

    async with endpoint(answer_two) as url:
        asked = settings(url)
        bench = BenchRun(asked)
        two_ended = asyncio.Event()
        task = asyncio.create_task(
            bench.run(lambda _: two_ended.set() if bench.result().summary.requests == 2 else None)
        )
        await asyncio.wait_for(two_ended.wait(), PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        never.set()
    result = bench.result()
    assert (result.partial, result.summary.requests, result.summary.errors) == (True, 2, 0)


@pytest.mark.parametrize("asks_engines", [False, True])
async def test_a_result_is_drawn_and_tabled(tmp_path: Path, asks_engines: bool) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    async with endpoint() as url:
        asked = settings(url, replicas=(url,) if asks_engines else ())
        bench = BenchRun(asked)
        await bench.run()
    results = {"one": bench.result(), "two": bench.result()}
    draw_results(results, tmp_path / "deep" / "figure.png", "title")
    assert (tmp_path / "deep" / "figure.png").read_bytes().startswith(b"\x89PNG")
    printed = StringIO()
    print_results(Console(file=printed, width=100), results)
    table, below = re.split("└.*\n", printed.getvalue())
    assert table.splitlines()[1].replace("┃", " ").split() == ["one", "two"]
    assert below.startswith("TTFT = first token - scheduled; ")
    assert ("│ hits (engines)" in table, "hits (engines):" in below) == (asks_engines, asks_engines)
