"""A LoRA adapter that a real engine loads and unloads while it runs, behind the gateway."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from preble.config import HealthConfig, ReplicaConfig
from preble.engines.starting.launch import Fleet, LaunchOptions
from support.adapters import make_tiny_lora
from support.gateways import gateway_before
from support.own_sglang import own_sglang
from support.own_vllm import own_vllm
from support.replicas import MODEL_NAME, SGLANG, TEST_TIMEOUT_S, VLLM
from support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]

SGLANG_LORA = (
    *("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "v_proj"),
    *("--lora-backend", "torch_native"),
)
PROMPT = list(range(100, 250))


@pytest.mark.vllm
async def test_an_adapter_of_vllm_is_noticed_asked_and_kept_apart_until_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = own_vllm(tmp_path, "--enable-lora", "--max-lora-rank", "8")
    adapter = make_tiny_lora(VLLM.with_name("python"), tmp_path / "adapter")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    await check_an_adapter(options, adapter, "/v1", 128, model="sql")


@pytest.mark.sglang
async def test_an_adapter_of_sglang_is_noticed_asked_and_kept_apart_until_it_goes(tmp_path: Path) -> None:
    options = own_sglang(tmp_path, *SGLANG_LORA)
    adapter = make_tiny_lora(SGLANG, tmp_path / "adapter")
    await check_an_adapter(options, adapter, "", 144, model=MODEL_NAME, lora_path="sql")


async def check_an_adapter(
    options: LaunchOptions, adapter: Path, root: str, in_whole_blocks: int, **asking: str
) -> None:
    """`root`: of the engine's paths to load and unload. `asking`: the fields by which the engine itself is asked for
    the adapter. `in_whole_blocks`: of the prompt."""
    async with (
        Fleet(options) as fleet,
        aiohttp.ClientSession(fleet.urls[0]) as engine,
        gateway_before([ReplicaConfig(fleet.urls[0])], health=HealthConfig(check_interval_s=0.2)) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        [replica] = gateway.serving.replicas.values()

        async def ask(model: str) -> tuple[int, int, int]:
            """Status, tokens expected to be cached, and those that were."""
            async with http.post("/v1/completions", json=body(model=model)) as answer:
                usage = (await answer.json()).get("usage") or {}
                matched = int(answer.headers.get("x-preble-matched-tokens", 0))
                return answer.status, matched, (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

        async def text(session: aiohttp.ClientSession, **fields: str) -> str:
            async with session.post("/v1/completions", json=body(**fields)) as answer:
                return str((await answer.json())["choices"][0]["text"])

        async def finds_it(model: str) -> bool:
            return await ask(model) == (200, in_whole_blocks, in_whole_blocks)

        async def change(what: str) -> None:
            names = {"lora_name": "sql"} | ({"lora_path": str(adapter)} if what == "load" else {})
            async with engine.post(f"{root}/{what}_lora_adapter", json=names) as answer:
                assert answer.status == 200, await answer.text()

        assert (await ask("sql"))[0] == 404
        await change("load")
        await eventually(lambda: replica.info.adapters == ("sql",), "the adapter is noticed")
        assert await ask(MODEL_NAME) == (200, 0, 0)
        assert await ask("sql") == (200, 0, 0), "it shares nothing with the base model"
        await eventually(lambda: finds_it("sql"), "the adapter's own prompt is found")
        await eventually(lambda: finds_it(MODEL_NAME), "the base model's is found")
        assert await text(http, model="sql") == await text(engine, **asking)
        assert await text(http, model="sql") != await text(http, model=MODEL_NAME)
        await change("unload")
        await eventually(lambda: replica.info.adapters == (), "its end is noticed")
        assert (await ask("sql"))[0] == 404


def body(**fields: str) -> dict[str, object]:
    return {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields}
