"""Real clients in environments of their own, before emulated replicas and real vLLM: they must work unchanged."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from preble.config import HealthConfig, ReplicaConfig
from preble.emulator.config import EmulatorConfig
from preble.emulator.server import EmulatorServer
from support.gateways import gateway_before, idle
from support.replicas import (
    EMBEDDING_MODEL,
    TEST_TIMEOUT_S,
    TINY_MODEL,
    VLLM,
    RunningReplicas,
    VllmPair,
    require_vllm,
)
from support.servers import ROOT, require_server

FOLDER = Path(__file__).parent / "scripts"
VLLM_PACKAGES = VLLM.parents[1] / "lib" / "python3.11" / "site-packages"
"""Where guidellm finds torch."""

TAKES_LONG_S = 240
"""On a busy machine: some of these libraries take tens of seconds to import."""
SCRIPTS = [
    "openai_sdk.py",
    "anthropic_sdk.py",
    "langchain_openai_chat.py",
    "litellm_calls.py",
    "sdks.mjs",
    "llama_index_calls.py",
    "instructor_calls.py",
    "llm_command.py",
    "locust_users.py",
    "guidellm_run.py",
]

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)


@asynccontextmanager
async def ready_gateway(urls: Sequence[str]) -> AsyncIterator[str]:
    health = HealthConfig(check_interval_s=1.0, retry_min_s=0.05, retry_max_s=0.5)
    async with gateway_before(list(map(ReplicaConfig, urls)), health=health) as gateway:
        yield gateway.url
        await idle(gateway)


@asynccontextmanager
async def before_emulated_replicas() -> AsyncIterator[str]:
    async with AsyncExitStack() as stack:
        config = EmulatorConfig(profile="tiny-cpu", speed=50.0, kv_tokens=16384, model="tiny")
        servers = [await stack.enter_async_context(EmulatorServer(config)) for _ in range(2)]
        yield await stack.enter_async_context(ready_gateway([server.url for server in servers]))


async def run(command: Sequence[str], embedding_model: str = EMBEDDING_MODEL, *, within_s: float = TAKES_LONG_S) -> str:
    """Run a client to its end. Return what it prints; it must succeed."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PREBLE_")}
    environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "CLIENTS": str(ROOT / ".servers" / "node-clients")}
    environ |= {"ENGINE_PACKAGES": str(VLLM_PACKAGES), "TOKENIZER": str(TINY_MODEL), "PYTHONFAULTHANDLER": "1"}
    environ |= {"EMBEDDING_MODEL": embedding_model}
    # A file: what the client has started may hold a pipe open for ever.
    with TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *command, env=environ, stdout=output, stderr=output, start_new_session=True
        )
        ended = await ends(process, within_s)
        output.seek(0)
        said = output.read().decode("utf-8", "replace")
    assert ended, f"{command[1]} does not end within {within_s:g} s; where it is, and what it said:\n{said[-8000:]}"
    assert process.returncode == 0, said[-4000:]
    return said


async def ends(process: asyncio.subprocess.Process, within_s: float) -> bool:
    """Wait for the end of a client. If that takes too long, end it and what it has started; Python says where it is."""
    try:
        for limit_s in (within_s, 10.0):
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await process.wait()
                    return limit_s == within_s
            os.killpg(process.pid, signal.SIGABRT)
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def command_of(script: str) -> list[str]:
    """How a script is run; the test skips where its environment is not set up."""
    name, program = ("node-clients", "node") if script.endswith(".mjs") else ("clients", "python")
    if script == "guidellm_run.py":
        require_vllm()
        name, program = "guidellm", "python"
    return [str(require_server(name, program)), str(FOLDER / script)]


async def test_a_client_that_hangs_is_ended_with_all_that_it_started() -> None:
    hangs = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])"
    with pytest.raises(AssertionError, match="does not end within"):
        await run([sys.executable, "-c", hangs], within_s=0.5)


@pytest.mark.clients
@pytest.mark.parametrize("script", SCRIPTS)
async def test_a_client_works_unchanged_before_emulated_replicas(script: str) -> None:
    command = command_of(script)
    async with before_emulated_replicas() as url:
        assert (await run([*command, url, "tiny"], embedding_model="tiny")).endswith("ok\n")


@pytest.mark.clients
@pytest.mark.vllm
@pytest.mark.parametrize("script", SCRIPTS)
async def test_a_client_works_unchanged_before_real_vllm(
    vllm_pair: VllmPair, vllm_embedding: RunningReplicas, script: str
) -> None:
    command = command_of(script)
    async with ready_gateway([*vllm_pair.urls, *vllm_embedding.urls]) as url:
        assert (await run([*command, url, "tiny"])).endswith("ok\n")


@pytest.mark.clients
@pytest.mark.vllm
@pytest.mark.parametrize(("backend", "path"), [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")])
async def test_vllms_own_benchmark_runs(vllm_pair: VllmPair, backend: str, path: str) -> None:
    async with ready_gateway(vllm_pair.urls) as url:
        model = str(ROOT / ".engines" / "models" / "tiny-llama")
        output = await run(
            [
                *(str(ROOT / ".engines" / "vllm" / "bin" / "vllm"), "bench", "serve", "--backend", backend),
                *("--endpoint", path, "--base-url", url, "--model", "tiny", "--tokenizer", model),
                *("--dataset-name", "random", "--random-input-len", "40", "--random-output-len", "4"),
                *("--num-prompts", "4", "--disable-tqdm"),
            ]
        )
    assert "Successful requests:" in output and output.split("Successful requests:")[1].split()[0] == "4", output
