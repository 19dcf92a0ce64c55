"""Every endpoint of the table, asked through the gateway and at the real engine itself: status and form are the same.

The statuses are those that docs/reference/http-api.md gives.
"""

from __future__ import annotations

import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from preble.config import ReplicaConfig
from preble.prompts.endpoints.errors import in_style
from preble.prompts.endpoints.table import BY_PREFIX, ENDPOINTS, Endpoint
from support.gateways import gateway_before, idle
from support.images import png
from support.replicas import EMBEDDING_MODEL, MODEL_NAME, TEST_TIMEOUT_S, RunningReplicas

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "http-api.md"
HI = [{"role": "user", "content": "Hi"}]
PAIRS = {"text_1": "a", "text_2": ["b"]}
RANKED = {"query": "a", "documents": ["b"]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HI},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 2}},
    "/inference/v1/generate": {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}},
    "/invocations": {"messages": HI, "max_tokens": 2},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v2/embed": {"texts": ["a"], "embedding_types": ["float"]},
    "/encode": {"text": "a"},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a", "text": "a"},
    "/v1/classify": {"input": "a"},
    "/v1/score": {**PAIRS, "query": "a", "items": ["b"], "label_token_ids": [5]},
    "/score": PAIRS,
    "/v1/rerank": RANKED,
    "/rerank": RANKED,
    "/v2/rerank": RANKED,
    "/v1/audio/transcriptions": {"file": b"no sound"},
    "/v1/audio/translations": {"file": b"no sound"},
    "/v1/audio/speech": {"input": "a", "voice": "b"},
    "/v1/images/generations": {"prompt": "a"},
    "/v1/images/edits": {"prompt": "a", "image": png(1)},
    "/v1/moderations": {"input": "a"},
    "/tokenize": {"prompt": "Hi"},
    "/v1/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [47, 80]},
    "/v1/detokenize": {"tokens": [47, 80]},
}
"""By path; one with bytes in it goes as a form."""


def form(value: Any) -> Any:
    """The fields of a JSON value and the types of what they hold."""
    match value:
        case dict():
            return {name: form(held) for name, held in value.items()}
        case list():
            return [form(value[0])] if value else []
        case _:
            return type(value).__name__


async def ask(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> tuple[int, str, bytes]:
    """Status, content type and body of the answer."""
    data: dict[str, Any] = {"json": body}
    if any(isinstance(value, bytes) for value in body.values()):
        data = {"data": {name: BytesIO(value) if isinstance(value, bytes) else value for name, value in body.items()}}
    async with http.post(path, **data) as answer:
        return answer.status, answer.content_type, await answer.read()


def statuses_on_the_page(engine: str) -> dict[str, int]:
    """By path: the status that the page's table gives for this engine."""
    section = PAGE.read_text().split("## What the engines answer")[1].split("\n## ")[0]
    head, _, *rows = re.findall(r"^\|(.*)\|$", section, re.MULTILINE)
    column = [cell.strip() for cell in head.split("|")].index(engine)
    found = {}
    for row in rows:
        cells = [cell.strip() for cell in row.split("|")]
        found |= dict.fromkeys(re.findall(r"`(/\S+)`", cells[0]), int(cells[column]))
    return found


@pytest.mark.parametrize(
    ("engine", "fixture", "model", "streamed"),
    [
        pytest.param("vLLM", "vllm_pair", MODEL_NAME, BY_PREFIX, marks=pytest.mark.vllm, id="vllm"),
        pytest.param("vLLM, embedding", "vllm_embedding", EMBEDDING_MODEL, (), marks=pytest.mark.vllm, id="embedding"),
        pytest.param("SGLang", "sglang", MODEL_NAME, BY_PREFIX, marks=pytest.mark.sglang, id="sglang"),
    ],
)
async def test_every_endpoint_answers_as_the_engine_does(
    request: pytest.FixtureRequest, engine: str, fixture: str, model: str, streamed: tuple[Endpoint, ...]
) -> None:
    replicas: RunningReplicas = request.getfixturevalue(fixture)
    statuses, differ = {}, []
    async with (
        gateway_before([ReplicaConfig(replicas.urls[0])]) as gateway,
        aiohttp.ClientSession(gateway.url) as through,
        aiohttp.ClientSession(replicas.urls[0]) as direct,
    ):
        bodies = [(path, BODIES[path] | {"model": model}) for path in ENDPOINTS]
        bodies += [(endpoint.path, BODIES[endpoint.path] | {"model": model, "stream": True}) for endpoint in streamed]
        for path, body in bodies:
            status, kind, theirs = await ask(direct, path, body)
            ours = await ask(through, path, body)
            statuses.setdefault(path, status)
            if ours[:2] != (status, kind) or not is_same(path, status, kind, theirs, ours[2]):
                differ.append((path, body, (status, kind, theirs[:500]), ours))
        await idle(gateway)
    assert not differ
    assert statuses == statuses_on_the_page(engine)


def is_same(path: str, status: int, kind: str, theirs: bytes, ours: bytes) -> bool:
    """Whether an error is the same text, a stream ends with the same kind of event, an answer has the same form."""
    if status != 200:
        return bool(in_style(ENDPOINTS[path].errors, status, theirs) == ours)
    if kind == "text/event-stream":
        return last_event(theirs) == last_event(ours)
    return bool(form(json.loads(theirs)) == form(json.loads(ours)))


def last_event(stream: bytes) -> bytes:
    """The first line of the last event."""
    return stream.strip().split(b"\n\n")[-1].splitlines()[0]
