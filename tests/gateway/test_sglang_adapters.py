"""A LoRA adapter that real SGLang loads and unloads while it runs, behind the gateway."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from preble.config import GatewayConfig, HealthConfig, ParityConfig, ReplicaConfig
from preble.engines.launch import Fleet
from preble.gateway.server import serving
from support.adapters import make_tiny_lora
from support.own_sglang import own_sglang
from support.replicas import MODEL_NAME, SGLANG, TEST_TIMEOUT_S
from support.waiting import eventually

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]

LORA = (
    *("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "v_proj"),
    *("--lora-backend", "torch_native"),
)
PROMPT = list(range(100, 250))


async def test_an_adapter_is_noticed_asked_and_kept_apart_until_it_goes(tmp_path: Path) -> None:
    options = own_sglang(tmp_path, *LORA)
    adapter = make_tiny_lora(SGLANG, tmp_path / "adapter")
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

            async def ask(model: str) -> tuple[int, int, int]:
                """Status, tokens expected to be cached, and those that were."""
                async with http.post("/v1/completions", json=body(model)) as answer:
                    usage = (await answer.json()).get("usage") or {}
                    matched = int(answer.headers.get("x-preble-matched-tokens", 0))
                    return answer.status, matched, (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

            async def text(session: aiohttp.ClientSession, model: str, **more: str) -> str:
                async with session.post("/v1/completions", json=body(model) | more) as answer:
                    return str((await answer.json())["choices"][0]["text"])

            async def finds_it(model: str) -> bool:
                return await ask(model) == (200, 144, 144)

            assert (await ask("sql"))[0] == 404
            async with engine.post("/load_lora_adapter", json={"lora_name": "sql", "lora_path": str(adapter)}) as done:
                assert done.status == 200, await done.text()
            await eventually(lambda: replica.info.adapters == ("sql",), "the adapter is noticed")
            assert await ask(MODEL_NAME) == (200, 0, 0)
            assert await ask("sql") == (200, 0, 0), "it shares nothing with the base model"
            await eventually(lambda: finds_it("sql"), "the adapter's own prompt is found")
            await eventually(lambda: finds_it(MODEL_NAME), "the base model's is found")
            assert await text(http, "sql") == await text(engine, MODEL_NAME, lora_path="sql")
            assert await text(http, "sql") != await text(http, MODEL_NAME)
            async with engine.post("/unload_lora_adapter", json={"lora_name": "sql"}) as done:
                assert done.status == 200, await done.text()
            await eventually(lambda: replica.info.adapters == (), "its end is noticed")
            assert (await ask("sql"))[0] == 404


def body(model: str) -> dict[str, object]:
    return {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
