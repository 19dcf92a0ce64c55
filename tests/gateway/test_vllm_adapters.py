"""A LoRA adapter that real vLLM loads and unloads while it runs, behind the gateway."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from preble.config import GatewayConfig, HealthConfig, ParityConfig, ReplicaConfig
from preble.engines.launch import Fleet
from preble.gateway.server import serving
from support.adapters import make_tiny_lora
from support.own_vllm import own_vllm
from support.replicas import MODEL_NAME, TEST_TIMEOUT_S, VLLM
from support.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]


async def test_an_adapter_is_noticed_when_it_comes_and_when_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = own_vllm(tmp_path, "--enable-lora", "--max-lora-rank", "8")
    adapter = make_tiny_lora(VLLM.with_name("python"), tmp_path / "adapter")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    async with Fleet(options) as fleet, aiohttp.ClientSession(fleet.urls[0]) as engine:
        config = GatewayConfig(
            replicas=(ReplicaConfig(fleet.urls[0]),),
            port=0,
            health=HealthConfig(check_interval_s=0.2),
            parity=ParityConfig(enabled=False),
        )
        async with serving(config) as gateway, aiohttp.ClientSession(gateway.url) as http:
            await eventually(lambda: len(gateway.serving.replicas) == 1, "it has joined")
            [replica] = gateway.serving.replicas.values()
            prompt = list(range(100, 250))

            async def ask(model: str) -> tuple[int, int, int]:
                """Status, tokens expected to be cached, and those that were."""
                body = {"model": model, "prompt": prompt, "max_tokens": 1}
                async with http.post("/v1/completions", json=body) as answer:
                    content = await answer.json()
                    usage = (content.get("usage") or {}).get("prompt_tokens_details") or {}
                    matched = int(answer.headers.get("x-preble-matched-tokens", 0))
                    return answer.status, matched, usage.get("cached_tokens", 0)

            async def finds_it(model: str) -> bool:
                return await ask(model) == (200, 128, 128)

            async def change(what: str) -> None:
                body = {"lora_name": "sql", "lora_path": str(adapter)}
                async with engine.post(f"/v1/{what}_lora_adapter", json=body) as answer:
                    assert answer.status == 200, await answer.text()

            assert (await ask("sql"))[0] == 404
            await change("load")
            await eventually(lambda: replica.info.adapters == ("sql",), "the adapter is noticed")
            assert await ask(MODEL_NAME) == (200, 0, 0)
            assert await ask("sql") == (200, 0, 0), "it shares nothing with the base model"
            await eventually(lambda: finds_it("sql"), "the adapter's own prompt is found")
            await eventually(lambda: finds_it(MODEL_NAME), "the base model's is found")
            await change("unload")
            await eventually(lambda: replica.info.adapters == (), "its end is noticed")
            assert (await ask("sql"))[0] == 404
