"""Odd bodies, sent through the gateway to real engines: none ends one."""

from __future__ import annotations

import json

import aiohttp
import pytest

from preble.config import EjectionConfig, ReplicaConfig
from support.gateways import gateway_before
from support.odd_bodies import ODD
from support.replicas import MODEL_NAME, TEST_TIMEOUT_S, TINY_MODEL, RunningReplicas

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)

ENDS = (
    *("ids-4096", "ids-big", "ids-list-big", "g-ids-4096", "g-ids-batch", "g-ids-empty-batch", "chat-ids"),
    *("top_k-2^31", "top_k-2^40", "logprobs-5000", "top_logprobs-5000", "g-top-5000", "g-top-list"),
    *("stop_ids-min", "stop_ids-neg-min", "stop_ids-2^40-min", "g-stopids-min", "g-stopids-neg-min"),
    *("stop_regex", "g-pos", "g-pos-list", "g-labels", "custom_labels"),
)
"""What ended SGLang, or stopped all its requests, when it was sent there itself."""


@pytest.mark.parametrize(
    "fixture", [pytest.param("vllm_pair", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)]
)
async def test_no_odd_body_ends_an_engine(request: pytest.FixtureRequest, fixture: str) -> None:
    replicas: RunningReplicas = request.getfixturevalue(fixture)
    well = {"model": MODEL_NAME, "prompt": [5, 6, 7], "max_tokens": 1}
    settings = {"tokenizer": str(TINY_MODEL), "ejection": EjectionConfig(enabled=False)}
    statuses: dict[str, int] = {}
    async with (
        gateway_before([ReplicaConfig(replicas.urls[0])], **settings) as gateway,
        aiohttp.ClientSession(gateway.url, timeout=aiohttp.ClientTimeout(total=None)) as http,
    ):
        for name, (path, body) in ODD.items():
            data = body if isinstance(body, str) else json.dumps(body)
            async with http.post(path, data=data, headers={"content-type": "application/json"}) as answer:
                await answer.read()
                statuses[name] = answer.status
            async with http.post("/v1/completions", json=well) as answer:
                assert answer.status == 200, f"after {name}: {await answer.text()}"
    assert replicas.replicas[0].is_alive
    assert {name: status for name, status in statuses.items() if status in (502, 503, 504)} == {}
    assert {name: statuses[name] for name in ENDS} == dict.fromkeys(ENDS, 400)
