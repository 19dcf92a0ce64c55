"""A real SGLang answers token ids as it answers their text: one gateway sends ids, the other the text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from preble.config import ParityConfig, ReplicaConfig, TokenizerConfig
from preble.gateway.server import Gateway
from preble.prompts.endpoints.ids import with_ids
from preble.serving import intake
from preble.serving.parity.answers import SPECIAL, every_script
from support.gateways import gateway_before
from support.replicas import TEST_TIMEOUT_S, TINY_MODEL

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TEST_TIMEOUT_S)]

PROSE = "def area(r):\n    return 3.14159 * r ** 2  # about right\n" * 20
PARITY = ParityConfig(answer_s=120.0, events_s=120.0, retry_s=600.0)
BODIES: dict[str, dict[str, Any]] = {
    "prose": {},
    "special names and emoji": {"prompt": SPECIAL * 3},
    "every script": {"prompt": every_script()},
    "logprobs": {"logprobs": 2},
    "two choices that stop": {"n": 2, "stop": ["e", "\n"]},
    "its ids": {"return_token_ids": True},
    "an echo": {"echo": True},
    "no special tokens": {"add_special_tokens": False},
    "a field that nobody knows": {"of_tomorrow": 1},
    "too long an answer": {"max_tokens": 100_000},
    "a wrong type": {"temperature": "hot"},
}
AS_TEXT = ("an echo", "no special tokens", "a field that nobody knows")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Bodies for engines that may have ids."""
    bodies: list[bytes] = []

    async def noted(*given: Any) -> bytes:
        bodies.append(await with_ids(*given))
        return bodies[-1]

    monkeypatch.setattr(intake, "with_ids", noted)
    monkeypatch.setattr(intake, "_IDS_PAY_FROM", 0)  # ships 4,000
    return bodies


@asynccontextmanager
async def before(url: str, *, send_ids: bool) -> AsyncIterator[Gateway]:
    """A gateway that has checked the replica."""
    models = {"tokenizer": str(TINY_MODEL), "profile": "tiny-cpu", "tokenizing": TokenizerConfig(send_ids=send_ids)}
    async with gateway_before([ReplicaConfig(url)], parity=PARITY, **models) as gateway:
        async with aiohttp.ClientSession(gateway.url) as http, http.post("/debug/parity") as answer:
            assert answer.status == 200
        assert [live.takes_ids for live in gateway.serving.replicas.values()] == [send_ids]
        yield gateway


async def answered(gateway: Gateway, path: str, body: dict[str, Any]) -> tuple[int, list[Any]]:
    """Status and answer, or the answer's events, without what differs from one answer to the next."""
    async with aiohttp.ClientSession(gateway.url) as http, http.post(path, json=body) as answer:
        raw = await answer.text()
    events = [json.loads(line.removeprefix("data: ")) for line in raw.splitlines() if "{" in line]
    return answer.status, [stable(event) for event in events]


def stable(value: Any) -> Any:
    """Without names, times and the state of the cache. Numbers that are computed differ in their last digits."""
    changing = ("id", "created", "metrics", "prompt_tokens_details", "cached_tokens", "cached_tokens_details")
    if isinstance(value, dict):
        return {name: stable(of) for name, of in value.items() if name not in changing and not is_time(name)}
    if isinstance(value, list):
        return [stable(one) for one in value]
    return pytest.approx(value, abs=0.1) if isinstance(value, float) else value


def is_time(name: str) -> bool:
    return name.endswith(("_time", "_ts", "latency", "_s", "_throughput", "_wait"))


def joined(events: list[Any]) -> tuple[Any, ...]:
    """The text of a stream, why it ended, and its usage. In how many events it comes depends on the engine's speed."""
    choices = [choice for event in events for choice in event["choices"]]
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    usage = [event["usage"] for event in events if event.get("usage")]
    return "".join(choice["text"] for choice in choices), ends, usage


async def test_answers_to_ids_are_the_answers_to_the_text(sglang_url: str, sent: list[bytes]) -> None:
    async with before(sglang_url, send_ids=True) as with_them, before(sglang_url, send_ids=False) as without:
        for name, fields in BODIES.items():
            body = {"model": "tiny", "prompt": PROSE, "max_tokens": 8, "temperature": 0} | fields
            await answered(without, "/v1/completions", body)  # from now on both find it cached
            sent.clear()
            to_text = await answered(without, "/v1/completions", body)
            assert not sent
            to_ids = await answered(with_them, "/v1/completions", body)
            assert len(sent) == 1 and (b'"prompt":[' in sent[0]) is (name not in AS_TEXT), name
            assert to_ids == to_text, name
            if to_text[0] == 200:
                streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
                (_, one), (_, other) = [
                    await answered(gateway, "/v1/completions", streamed) for gateway in (with_them, without)
                ]
                assert joined(one) == joined(other) and joined(one)[2], name


async def test_sglang_generates_alike_from_a_text_and_its_ids(sglang_url: str, sent: list[bytes]) -> None:
    async with before(sglang_url, send_ids=True) as with_them, before(sglang_url, send_ids=False) as without:
        sampling = {"temperature": 0, "max_new_tokens": 8}
        for fields in ({}, {"return_logprob": True, "top_logprobs_num": 2}):
            body = {"model": "tiny", "text": PROSE, "sampling_params": sampling, **fields}
            answers = [await answered(gateway, "/generate", body) for gateway in (without, without, with_them)]
            assert answers[1] == answers[2] and answers[2][0] == 200
        assert len(sent) == 2 and all(b'"input_ids":[' in one for one in sent)
