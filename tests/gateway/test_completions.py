"""What a client gets when all goes well."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.conftest import Serve
from gateway.fakes import gated_stream, replicas, with_headers
from support.waiting import eventually


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The decoded events of a stream, which must end with [DONE]."""
    *blocks, last, rest = raw.split(b"\n\n")
    assert (last, rest) == (b"data: [DONE]", b"")
    return [json.loads(block.removeprefix(b"data: ")) for block in blocks]


async def test_a_completion_passes_through_and_says_where_it_ran(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        status, body, headers = await gateway.complete()
        assert (status, body["choices"][0]["text"], body["usage"]["completion_tokens"]) == (200, "hello:0", 3)
        assert headers["x-preble-replica"] == one.url
        assert headers["x-preble-reason"] == "policy"
        assert headers["x-preble-matched-tokens"] == "0"
        assert headers["content-type"] == "application/json; charset=utf-8"


async def test_the_body_reaches_the_replica_byte_for_byte(serve: Serve) -> None:
    raw = b'{ "prompt" : "h\\u00e9",\n "model":"tiny", "min_p": 0.50, "unknown": {"a": [1, 2 ]} }'
    async with replicas(1) as [one], serve([one]) as gateway:
        async with gateway.http.post("/v1/completions", data=raw) as answer:
            assert answer.status == 200
        assert one.bodies == [raw]


async def test_a_stream_passes_through_untouched(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        one.cached_tokens = 2
        fields = {"model": "tiny", "prompt": "ab", "stream": True, "n": 2, "stream_options": {"include_usage": True}}
        async with gateway.http.post("/v1/completions", json=fields) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            assert answer.headers["x-preble-replica"] == one.url
            events = events_of(await answer.read())
        assert [event["choices"][0]["index"] for event in events[:-1]] == [0, 1] * 3
        assert events[-1]["usage"]["completion_tokens"] == 6
        await gateway.idle()
        text = await gateway.metrics()
        assert f'preble_output_tokens_total{{model="tiny",replica="{one.url}"}} 6.0' in text
        assert f'preble_cached_tokens_total{{model="tiny",replica="{one.url}"}} 2.0' in text


async def test_without_usage_in_the_stream_its_events_are_counted(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        async with gateway.http.post("/v1/completions", json={"prompt": "ab", "stream": True}) as answer:
            await answer.read()
        await gateway.idle()
        assert f'preble_output_tokens_total{{model="tiny",replica="{one.url}"}} 3.0' in await gateway.metrics()


async def test_a_chat_is_served_whole_and_streamed(serve: Serve) -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with replicas(1) as [one], serve([one]) as gateway:
        async with gateway.http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages}) as answer:
            choice = (await answer.json())["choices"][0]
            assert (answer.status, choice["message"]["content"]) == (200, "hi:0")
        fields = {"model": "tiny", "messages": messages, "stream": True}
        async with gateway.http.post("/v1/chat/completions", json=fields) as answer:
            assert len(events_of(await answer.read())) == 3


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], ["text"], [[1, 2, 3]]])
async def test_one_prompt_in_any_form_is_forwarded_as_it_came(serve: Serve, prompt: Any) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        status, _, _ = await gateway.complete(prompt=prompt)
        assert (status, one.requests[0]["prompt"]) == (200, prompt)


@pytest.mark.parametrize("prompts", [["a", "bb", "ccc"], [[1], [2, 2], [3, 3, 3]]])
async def test_a_list_of_prompts_is_spread_and_merged_in_order(serve: Serve, prompts: list[Any]) -> None:
    async with replicas(3) as fakes, serve(fakes) as gateway:
        for fake in fakes:
            fake.cached_tokens = 2
        status, body, headers = await gateway.complete(prompt=prompts, n=2)
        assert status == 200
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
        assert [choice["text"] for choice in body["choices"]] == [f"{p}:{j}" for p in prompts for j in (0, 1)]
        assert body["usage"]["completion_tokens"] == 18
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}
        assert headers["x-preble-replica"] == ",".join(sorted(fake.url for fake in fakes))
        assert sorted(str(fake.requests[0]["prompt"]) for fake in fakes) == sorted(map(str, prompts))


async def test_a_streamed_list_is_one_stream_with_one_usage(serve: Serve) -> None:
    fields = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    async with replicas(2) as fakes, serve(fakes) as gateway:
        async with gateway.http.post("/v1/completions", json=fields) as answer:
            *events, usage = events_of(await answer.read())
        texts: dict[int, list[str]] = {}
        for event in events:
            texts.setdefault(event["choices"][0]["index"], []).append(event["choices"][0]["text"])
        assert texts == {i * 2 + j: [f"{p}:{k}" for k in range(3)] for i, p in enumerate("ab") for j in (0, 1)}
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 12)
        assert len({event["id"] for event in [*events, usage]}) == 1


async def test_a_sane_request_id_is_kept_and_passed_on(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        headers = {"X-Request-Id": "my-id.1", "traceparent": "00-ab-cd-01", "Authorization": "Bearer mine"}
        async with gateway.http.post("/v1/completions", json={"prompt": "a"}, headers=headers) as answer:
            assert answer.headers["x-request-id"] == "my-id.1"
        sent = {name.lower(): value for name, value in one.headers[0].items()}
        assert (sent["x-request-id"], sent["traceparent"]) == ("my-id.1", "00-ab-cd-01")
        assert "authorization" not in sent
        async with gateway.http.post("/v1/completions", json={}, headers={"X-Request-Id": "b a d"}) as answer:
            assert answer.headers["x-request-id"] not in ("", "b a d")


async def test_headers_of_a_replica_come_back_byte_for_byte(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        one.script.append(with_headers({"x-note": "你好"}))
        async with gateway.http.post("/v1/completions", json={"prompt": "a"}) as answer:
            assert answer.status == 200
            assert dict(answer.raw_headers)[b"x-note"] == "你好".encode()


async def test_a_replica_that_is_a_gateway_itself_does_not_say_where_ours_has_placed(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        theirs = ("x-preble-replica", "x-preble-reason", "x-preble-matched-tokens", "x-request-id")
        one.script.append(with_headers(dict.fromkeys(theirs, "theirs") | {"x-preble-emulated": "yes"}))
        async with gateway.http.post("/v1/completions", json={"prompt": "a"}) as answer:
            assert answer.headers["x-preble-emulated"] == "yes"
            assert [len(answer.headers.getall(name)) for name in theirs] == [1, 1, 1, 1]
            assert answer.headers["x-preble-replica"] == one.url


async def test_models_are_the_union_of_the_live_replicas(serve: Serve) -> None:
    both = [{"id": "tiny"}, {"id": "other"}]
    async with replicas(1) as [one], replicas(1, models=both) as [two], serve([one, two]) as gateway:
        async with gateway.http.get("/v1/models") as answer:
            body = await answer.json()
        assert [model["id"] for model in body["data"]] == ["other", "tiny"]


async def test_a_model_is_served_only_where_it_is(serve: Serve) -> None:
    async with replicas(2) as fakes, replicas(1, models=[{"id": "other"}]) as [two], serve([*fakes, two]) as gateway:
        for _ in range(4):
            _, _, headers = await gateway.complete(model="other")
            assert headers["x-preble-replica"] == two.url
        status, body, _ = await gateway.complete(model="neither")
        assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
        assert "other, tiny" in body["error"]["message"]
        text = await gateway.metrics()
        assert 'preble_responses_total{model="",path="/v1/completions",status="404"} 1.0' in text
        assert "neither" not in text, "clients would choose how many series there are"


async def test_health_ready_and_metrics(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        for path in ("/health", "/ready"):
            async with gateway.http.get(path) as answer:
                assert answer.status == 200
        async with gateway.http.head("/health") as answer:
            assert answer.status == 200
        await gateway.complete()
        text = await gateway.metrics()
        assert f'preble_placements_total{{model="tiny",reason="policy",replica="{one.url}"}} 1.0' in text
        assert 'preble_responses_total{model="tiny",path="/v1/completions",status="200"} 1.0' in text
        assert f'preble_replica_up{{replica="{one.url}"}} 1.0' in text


async def test_e2_sends_a_known_prefix_where_it_is(serve: Serve) -> None:
    async with replicas(3) as fakes, serve(fakes, policy="e2") as gateway:
        shared = list(range(64))
        _, _, first = await gateway.complete(prompt=[*shared, 1])
        for tail in range(2, 6):
            _, _, headers = await gateway.complete(prompt=[*shared, tail])
            assert headers["x-preble-replica"] == first["x-preble-replica"]
            assert headers["x-preble-reason"] == "exploit"
            assert headers["x-preble-matched-tokens"] == "64"


async def test_different_cache_salts_and_adapters_share_no_prefix(serve: Serve) -> None:
    models = [{"id": "tiny"}, {"id": "alias"}, {"id": "lora", "parent": "tiny"}]
    async with replicas(1, models=models) as [one], serve([one], policy="e2") as gateway:
        prompt = list(range(64))

        async def matched(**fields: Any) -> str:
            _, _, headers = await gateway.complete(prompt=prompt, **fields)
            return headers["x-preble-matched-tokens"]

        assert await matched() == "0"
        assert await matched(cache_salt="s") == "0"
        assert await matched(model="lora") == "0"
        assert await matched(model="lora", cache_salt="s") == "0"
        assert [await matched(), await matched(model="alias"), await matched(cache_salt="s")] == ["48"] * 3


async def test_the_time_to_the_first_token_counts_from_the_requests_arrival_with_its_parts(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        one.tokenize_gated = True

        async def ask() -> None:
            async with gateway.http.post("/v1/completions", json={"prompt": "hello", "stream": True}) as answer:
                await answer.read()

        asked = asyncio.create_task(ask())
        await eventually(lambda: one.tokenizing == 1)
        one.gate.set()
        await asked
        numbers = gateway.gateway.serving.telemetry.numbers
        parts = ("tokenizing", "queueing", "replica_ttft")  # the decision, "placing", lies within the last
        whole = numbers.sum_by("", "preble_ttft_seconds")[""][-1]
        assert numbers.sum_by("model", "preble_ttft_seconds").keys() == {"tiny"}, "the client named no model"
        assert whole >= sum(numbers.sum_by("", f"preble_{part}_seconds")[""][-1] for part in parts) > 0


GAP_S = 0.05


async def test_the_gaps_between_the_pieces_of_a_stream_are_counted(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        numbers = gateway.gateway.serving.telemetry.numbers
        one.script.append(gated_stream)
        async with gateway.http.post("/v1/completions", json={"prompt": "hello", "stream": True}) as answer:
            await answer.content.readany()
            await asyncio.sleep(GAP_S)
            one.gate.set()
            await answer.read()
        cell = numbers.sum_by("model", "preble_itl_seconds")["tiny"]
        assert sum(cell[:-1]) >= 1, "events that come at once are one piece"
        assert cell[-1] >= GAP_S, "their sum"
        picture = await gateway.gateway.serving.picture()
        assert picture.counts.itl == cell and len(cell) == len(picture.itl_bounds) + 2, "on the live page, too"


async def test_whole_answers_have_no_gaps(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        async with gateway.http.post("/v1/completions", json={"prompt": "hello"}) as answer:
            assert answer.status == 200
        assert gateway.gateway.serving.telemetry.numbers.sum_by("model", "preble_itl_seconds") == {}
