"""Requests that are wrong: a clear answer in OpenAI's form, never a traceback, and the gateway serves on."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any

import pytest

from gateway.conftest import Serve
from gateway.fakes import replicas
from preble.config import AuthConfig, LimitsConfig

DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("path", "raw", "param"),
    [
        ("completions", b"", None),
        ("completions", b"{", None),
        ("completions", b"[]", None),
        ("completions", b"\xff\xfe", None),
        ("completions", b'{"prompt": "\xff"}', None),
        ("completions", b'{"prompt": "\\ud800"}', None),
        ("completions", b"{}", "prompt"),
        ("completions", b'{"prompt": null}', "prompt"),
        ("completions", b'{"prompt": 7}', "prompt"),
        ("completions", b'{"prompt": []}', "prompt"),
        ("completions", b'{"prompt": [[]]}', "prompt"),
        ("completions", b'{"prompt": [1, "a"]}', "prompt[1]"),
        ("completions", b'{"prompt": ["a", 1]}', "prompt[1]"),
        ("completions", b'{"prompt": [-1]}', "prompt[0]"),
        ("completions", b'{"prompt": [4294967296]}', "prompt[0]"),
        ("completions", b'{"prompt": [1.5]}', "prompt[0]"),
        ("completions", b'{"prompt": {"text": "a"}}', "prompt"),
        ("completions", b'{"prompt": "a", "stream": "yes"}', "stream"),
        ("completions", b'{"prompt": "a", "n": 0}', "n"),
        ("completions", b'{"prompt": "a", "max_tokens": "many"}', "max_tokens"),
        ("completions", b'{"prompt": "a", "model": 3}', "model"),
        ("completions", b'{"prompt": "a", "stream_options": {"include_usage": 3}}', "stream_options.include_usage"),
        ("completions", b'{"prompt": ' + DEEP, None),
        ("completions", b'{"prompt": "a", "other": ' + DEEP, None),
        ("chat/completions", b"{}", "messages"),
        ("chat/completions", b'{"messages": "hi"}', "messages"),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "n": "two"}', "n"),
        ("chat/completions", b'{"messages": ' + DEEP, None),
    ],
)
async def test_a_wrong_body_is_a_400_that_names_the_field(
    serve: Serve, path: str, raw: bytes, param: str | None
) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        async with gateway.http.post(f"/v1/{path}", data=raw) as answer:
            body = await answer.json()
        assert (answer.status, body["error"]["type"]) == (400, "invalid_request_error")
        assert body["error"]["param"] == param
        assert body["error"]["message"] and "Traceback" not in body["error"]["message"]
        assert one.requests == []


IMAGE = b'[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "\xff"}}]}]'


@pytest.mark.parametrize(
    ("path", "raw"),
    [
        ("/v1/completions", b'{"prompt": ["a", "b"], "\xff": 1}'),
        ("/v1/chat/completions", b'{"messages": ' + IMAGE + b"}"),
        ("/v1/chat/completions", b'{"messages": ' + IMAGE.replace(b"\xff", b"a") + b', "\xff": 1}'),
        ("/v1/messages", b'{"model": "tiny", "messages": [], "temperature": 1e400}'),
        ("/v1/messages", b'{"model": "tiny", "messages": [], "metadata": {"a": "\xff"}}'),
        ("/v1/responses", b'{"input": "a", "temperature": 1e400}'),
        ("/v1/responses", b'{"input": "a", "metadata": {"\xff": 1}}'),
    ],
)
async def test_what_shows_only_where_all_of_a_body_is_read_is_the_clients_mistake_too(
    serve: Serve, path: str, raw: bytes
) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        async with gateway.http.post(path, data=raw) as answer:
            text = await answer.text()
        assert (answer.status, one.requests) == (400, [])
        assert "valid JSON" in text or "out of range" in text


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "a", "top_k": 2**31}, "top_k"),
        ("/v1/completions", {"prompt": "a", "top_k": 1e12}, "top_k"),
        ("/v1/completions", {"prompt": "a", "top_k": "3000000000"}, "top_k"),
        ("/v1/completions", {"prompt": "a", "logprobs": 32_000}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [3, -1]}, "stop_token_ids"),
        ("/v1/completions", {"prompt": "a", "stop_regex": "(.+)+@"}, "stop_regex"),
        ("/v1/chat/completions", {"messages": [], "logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
        ("/v1/messages", {"model": "tiny", "messages": [], "top_k": 2**40}, "top_k"),
        ("/v1/responses", {"input": "a", "top_k": 2**40}, "top_k"),
        ("/generate", {"text": "a", "top_logprobs_num": [1, 10**6]}, "top_logprobs_num"),
        ("/generate", {"text": "a", "sampling_params": {"top_k": 2**40}}, "sampling_params.top_k"),
        ("/generate", {"text": "a", "input_ids": [[]]}, "input_ids"),
        ("/generate", {"text": ["a"], "sampling_params": [{"stop_regex": "a"}]}, "sampling_params.stop_regex"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"top_k": 2**40}}, "sampling_params.top_k"),
    ],
)
async def test_a_value_that_ends_an_engine_is_a_400_and_reaches_no_replica(
    serve: Serve, path: str, fields: dict[str, Any], param: str
) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        async with gateway.http.post(path, json=fields) as answer:
            text = await answer.text()
        assert (answer.status, one.requests) == (400, [])
        assert f"`{param}`" in text


async def test_usual_values_of_guarded_fields_are_passed_on(serve: Serve) -> None:
    usual = {"top_k": -1, "logprobs": 5, "min_tokens": 0, "stop_token_ids": [1, 2], "stop_regex": None}
    async with replicas(1) as [one], serve([one]) as gateway:
        assert (await gateway.complete(prompt="a", **usual))[0] == 200
        assert usual.items() <= one.requests[-1].items()


async def test_a_prompt_longer_than_the_context_is_a_400(serve: Serve) -> None:
    async with replicas(1, max_model_len=100) as [one], serve([one], policy="e2") as gateway:
        status, body, _ = await gateway.complete(prompt=list(range(101)))
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        status, body, _ = await gateway.complete(prompt=["a", "b" * 101])
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        await gateway.idle()


async def test_a_prompt_that_is_to_be_truncated_is_placed_by_its_tail(serve: Serve) -> None:
    async with replicas(1, max_model_len=100) as [one], serve([one], policy="e2") as gateway:
        assert (await gateway.complete(prompt=list(range(101)), truncate_prompt_tokens=32))[0] == 200
        _, _, headers = await gateway.complete(prompt=list(range(69, 101)))
        assert headers["x-preble-matched-tokens"] == "16"


async def test_an_empty_text_is_the_engines_business(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one], policy="e2") as gateway:
        assert (await gateway.complete(prompt=""))[0] == 200


@pytest.mark.parametrize("prompt", [["a"] * 1025, [[1, 2]] * 1025])
async def test_too_many_prompts_in_one_request_are_refused(serve: Serve, prompt: Any) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        status, body, _ = await gateway.complete(prompt=prompt)
        assert (status, body["error"]["param"]) == (400, "prompt")
        assert "1025 prompts; at most 1024" in body["error"]["message"] and one.requests == []


async def test_as_many_prompts_as_an_engine_takes_are_answered(serve: Serve) -> None:
    """An evaluation's list: 300, where 128 was the limit."""
    async with replicas(1) as [one], serve([one]) as gateway:
        status, body, _ = await gateway.complete(prompt=["a"] * 300)
        assert (status, len(body["choices"])) == (200, 300)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "a", "n": 20_000}, "n"),
        ("/v1/completions", {"prompt": "a", "n": 129}, "n"),
        ("/v1/completions", {"prompt": ["a"] * 9, "n": 128}, "n"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 100_000}, "n"),
        ("/generate", {"text": "a", "sampling_params": {"n": 129}}, "sampling_params.n"),
        ("/generate", {"text": ["a"] * 9, "sampling_params": [{"n": 1}, {"n": 128}]}, "sampling_params.n"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 129}}, "sampling_params.n"),
        ("/invocations", {"prompt": "a", "n": 129}, "n"),
    ],
)
async def test_more_answers_than_the_limit_are_refused(
    serve: Serve, path: str, fields: dict[str, Any], param: str
) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        async with gateway.http.post(path, json=fields) as answer:
            body = await answer.json()
        assert (answer.status, body["error"]["param"], one.requests) == (400, param, [])


async def test_each_answer_to_a_prompt_counts_as_load(serve: Serve) -> None:
    limits = LimitsConfig(max_in_flight=8)
    async with replicas(1) as [one], serve([one], limits=limits) as gateway:
        assert (await gateway.complete(prompt="a", n=8))[0] == 200
        status, body, _ = await gateway.complete(prompt="a", n=9)
        assert (status, "9 answers are asked for; at most 8" in body["error"]["message"]) == (400, True)


async def test_token_ids_over_the_context_are_refused_before_they_are_decoded(serve: Serve) -> None:
    """Some of them are no ids at all: nobody has looked."""
    async with replicas(1, max_model_len=8192) as [one], serve([one]) as gateway:
        raw = b'{"prompt": [' + b"1," * 2_000_000 + b"-1]}"
        async with gateway.http.post("/v1/completions", data=BytesIO(raw)) as answer:
            body = await answer.json()
        assert (answer.status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert "prompt is too long: 2000001 tokens > 8192 maximum" in body["error"]["message"]


async def test_long_lists_of_token_ids_arrive_as_they_were(serve: Serve) -> None:
    async with replicas(1, max_model_len=10**7) as [one], serve([one], policy="e2") as gateway:
        ids = [number * 7919 % 100_000 for number in range(100_000)]
        async with gateway.http.post("/v1/completions", data=BytesIO(json.dumps({"prompt": ids}).encode())) as answer:
            assert answer.status == 200
        _, _, headers = await gateway.complete(prompt=ids[:50_000])
        assert headers["x-preble-matched-tokens"] == "49984"
        ids[70_000] = -1
        async with gateway.http.post("/v1/completions", data=BytesIO(json.dumps({"prompt": ids}).encode())) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, "prompt")


async def test_a_body_over_the_limit_is_a_413_and_is_not_kept(serve: Serve) -> None:
    limits = LimitsConfig(max_body_bytes=100_000)
    async with replicas(1) as [one], serve([one], limits=limits) as gateway:
        for size in (100_001, 300_000, 50_000_000):
            raw = b'{"prompt": "' + b"a" * (size - 14) + b'"}'
            async with gateway.http.post("/v1/completions", data=BytesIO(raw), expect100=size > 1_000_000) as answer:
                assert answer.status == 413
                assert (await answer.json())["error"]["code"] == "request_too_large"
        raw = b'{"prompt": "' + b"a" * (8000 - 14) + b'"}'
        async with gateway.http.post("/v1/completions", data=raw) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/audio/transcriptions"])
async def test_a_compressed_body_is_a_415_that_says_so(serve: Serve, path: str) -> None:
    headers = {"content-encoding": "gzip", "content-type": "multipart/form-data; boundary=b"}
    async with replicas(1) as [one], serve([one]) as gateway:
        async with gateway.http.post(path, data=gzip.compress(b'{"prompt": "hi"}'), headers=headers) as answer:
            assert answer.status == 415
            assert "Content-Encoding: gzip" in (await answer.json())["error"]["message"]
        headers = {"content-encoding": "identity"}
        async with gateway.http.post("/v1/completions", json={"prompt": "hi"}, headers=headers) as answer:
            assert answer.status == 200
        await gateway.idle()


async def test_an_endless_body_of_unknown_length_is_a_413(serve: Serve) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 10_000

    limits = LimitsConfig(max_body_bytes=100_000)
    async with (
        replicas(1) as [one],
        serve([one], limits=limits) as gateway,
        gateway.http.post("/v1/completions", data=pieces()) as answer,
    ):
        assert answer.status == 413


async def test_a_large_body_in_many_pieces_is_put_together(serve: Serve) -> None:
    async with replicas(1, max_model_len=10**7) as [one], serve([one]) as gateway:
        prompt = "x" * 3_000_000
        raw = BytesIO(b'{"prompt": "%s"}' % prompt.encode())
        async with gateway.http.post("/v1/completions", data=raw) as answer:
            assert answer.status == 200
        assert one.requests[0]["prompt"] == prompt


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/", 405, "method_not_allowed"),
        ("POST", "/v1/v1/completions", 404, "not_found"),
    ],
)
async def test_wrong_paths_and_methods(serve: Serve, method: str, path: str, status: int, code: str) -> None:
    async with replicas(1) as [one], serve([one]) as gateway, gateway.http.request(method, path) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (status, code)
        assert ("/v1/chat/completions," in error["message"] and "/health" in error["message"]) or status != 404


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Basic key-1", 401),
        ("Bearer ", 401),
        ("Bearer key-1", 200),
        ("bearer key-2", 200),
    ],
)
async def test_api_keys_guard_the_api_and_stay_here(serve: Serve, given: str | None, status: int) -> None:
    auth = AuthConfig(api_keys=("key-1", "key-2"), engine_api_key="inner")
    async with replicas(1) as [one], serve([one], auth=auth) as gateway:
        headers = {} if given is None else {"Authorization": given}
        async with gateway.http.post("/v1/completions", json={"prompt": "a"}, headers=headers) as answer:
            assert answer.status == status
            if status == 401:
                assert (await answer.json())["error"]["code"] == "invalid_api_key"
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert [sent["Authorization"] for sent in one.headers] == ["Bearer inner"] * (status == 200)
        async with gateway.http.get("/health") as answer:
            assert answer.status == 200


async def test_the_clients_authorization_is_forwarded_where_configured(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one], auth=AuthConfig(forward_authorization=True)) as gateway:
        headers = {"Authorization": "Bearer mine"}
        async with gateway.http.post("/v1/completions", json={"prompt": "a"}, headers=headers) as answer:
            assert answer.status == 200
        assert one.headers[0]["Authorization"] == "Bearer mine"
