"""Spans of requests, as the official SDK sends them: to a receiver here, and by way of a real collector."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.conftest import Serve
from gateway.fakes import replicas, status
from preble.config import TracingConfig
from preble.errors import ConfigError
from preble.serving.telemetry import tracing
from support.collector import collector as real_collector
from support.web_app import listening

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = "a prompt that is long enough for a few blocks of tokens " * 3


class Span:
    """One span as it was received."""

    def __init__(self, span: Any) -> None:
        self.name: str = span.name
        self.trace, self.id, self.parent = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
        self.began, self.ended = span.start_time_unix_nano, span.end_time_unix_nano
        self.failed = span.status.code == 2
        self.attributes = {one.key: value_of(one.value) for one in span.attributes}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [value_of(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


class Receiver:
    """What a collector has got. `services`: the names of who sent it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        export = ExportTraceServiceRequest.FromString(await request.read())
        for of_resource in export.resource_spans:
            names = {one.key: value_of(one.value) for one in of_resource.resource.attributes}
            self.services.add(names["service.name"])
            self.spans += [Span(span) for of_scope in of_resource.scope_spans for span in of_scope.spans]
        return web.Response(body=b"", content_type="application/x-protobuf")

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@asynccontextmanager
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    app = web.Application()
    app.router.add_post("/v1/traces", made.take)
    async with listening(app) as url:
        made.url = f"{url}/v1/traces"
        yield made


@asynccontextmanager
async def straight(to: str) -> AsyncIterator[str]:
    yield to


@pytest.mark.parametrize("way", [straight, real_collector], ids=["straight", "by-a-collector"])
async def test_a_request_has_its_spans_below_the_clients_and_the_replica_goes_on_with_them(
    serve: Serve, way: Callable[[str], AbstractAsyncContextManager[str]]
) -> None:
    async with receiver() as collector, way(collector.url) as endpoint:
        traced = TracingConfig(endpoint=endpoint, service="chat")
        async with replicas(2) as fakes, serve(fakes, policy="preble", tracing=traced) as gateway:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1", "session-id": "s1"}
            body = {"model": "tiny", "prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True}}
            async with gateway.http.post("/v1/completions", json=body, headers=headers) as answer:
                assert answer.status == 200
                await answer.read()
            await gateway.idle()
            [sent] = [one for fake in fakes for one in fake.headers]
        # leaving the gateway sends the rest
    assert collector.services == {"chat"} and {span.trace for span in collector.spans} == {TRACE}
    [request], [replica] = collector.named("POST /v1/completions"), collector.named("replica")
    assert request.parent == PARENT and request.attributes["gen_ai.request.model"] == "tiny"
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["gen_ai.conversation.id"] == "s1"
    for name in ("tokenize", "queue", "place", "replica"):
        [span] = collector.named(name)
        assert span.parent == request.id
        assert request.began <= span.began <= span.ended <= request.ended, name
    [first] = collector.named("first token")
    assert first.parent == replica.id and replica.began <= first.began <= first.ended <= replica.ended
    names = {name.lower(): value for name, value in sent.items()}
    assert names["traceparent"] == f"00-{TRACE}-{replica.id}-01" and names["tracestate"] == "vendor=1"
    assert replica.attributes["gen_ai.usage.output_tokens"] == 3


async def test_the_placements_span_has_what_each_candidate_would_cost(serve: Serve) -> None:
    async with (
        receiver() as collector,
        replicas(2) as fakes,
        serve(fakes, policy="preble", tracing=TracingConfig(endpoint=collector.url)) as gateway,
    ):
        for end in ("one", "two"):
            assert (await gateway.complete(prompt=PROMPT + end, stream=False))[0] == 200
        decisions = list(gateway.gateway.serving.recent.latest(2))[::-1]
        await gateway.stop()  # sends the rest
    for span, decision in zip(collector.named("place"), decisions, strict=True):
        found = span.attributes
        assert (found["preble.replica"], found["preble.reason"]) == (decision.replica, decision.reason)
        assert found["preble.matched_tokens"] == decision.matched_tokens
        by_replica = {one.replica: one for one in decision.candidates}
        assert set(found["preble.candidates.replica_id"]) == set(by_replica) and len(by_replica) == 2
        assert found["preble.candidates.replica_id"][0] == decision.replica, "the chosen one comes first"
        for i, name in enumerate(found["preble.candidates.replica_id"]):
            assert found["preble.candidates.prefill_s"][i] == by_replica[name].prefill_s


async def test_each_replica_that_was_tried_has_a_span_and_failures_say_so(serve: Serve) -> None:
    async with (
        receiver() as collector,
        replicas(2) as fakes,
        serve(fakes, tracing=TracingConfig(endpoint=collector.url)) as gateway,
    ):
        for fake in fakes:
            fake.script.append(status(500))
        assert (await gateway.complete())[0] == 500
        async with gateway.http.post("/v1/completions", json={"model": "none", "prompt": "x"}) as answer:
            assert answer.status == 404
        await gateway.stop()  # sends the rest
    assert [span.attributes["http.response.status_code"] for span in collector.named("replica")] == [500, 500]
    served, unknown = collector.named("POST /v1/completions")
    assert served.attributes["http.response.status_code"] == 500
    assert unknown.failed and unknown.attributes["error.type"] == "UnknownModel"
    assert unknown.attributes["http.response.status_code"] == 404


@pytest.mark.parametrize("parent", [f"00-{TRACE}-{PARENT}-00", None], ids=["not-by-the-client", "not-by-us"])
async def test_a_request_that_is_not_sampled_sends_nothing_and_says_so_to_the_replica(
    serve: Serve, parent: str | None
) -> None:
    async with receiver() as collector:
        traced = TracingConfig(endpoint=collector.url, sample=1.0 if parent else 0.0)
        async with replicas(1) as [one], serve([one], tracing=traced) as gateway:
            headers = {"traceparent": parent} if parent else {}
            body = {"model": "tiny", "prompt": "hello"}
            async with gateway.http.post("/v1/completions", json=body, headers=headers) as answer:
                assert answer.status == 200
            passed = {name.lower(): value for name, value in one.headers[0].items()}["traceparent"]
            assert not int(passed[-2:], 16) & 1 and (parent is None or TRACE in passed)
    assert collector.spans == []


async def test_a_collector_that_is_away_costs_no_request_anything(serve: Serve) -> None:
    async with (
        replicas(1) as [one],
        serve([one], tracing=TracingConfig(endpoint="http://127.0.0.1:9/v1/traces")) as gateway,
    ):
        for _ in range(3):
            assert (await gateway.complete())[0] == 200


async def test_a_missing_library_is_named(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"preble\[otel\]"):
        tracing.make_tracing(TracingConfig(endpoint="http://127.0.0.1:9/v1/traces"))


async def test_nothing_of_it_is_loaded_where_nobody_wants_spans() -> None:
    check = "import sys, preble.gateway.server; assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    found = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", check], check=False)
    assert found.returncode == 0
