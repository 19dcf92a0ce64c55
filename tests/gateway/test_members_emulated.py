"""Emulated replicas, each a process of its own, come and go through every source under a steady stream of requests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from gateway.test_members import AS_ADMIN, FAST, Operator, steady, write
from preble.config.load import ConfigSources
from preble.core.types import ReplicaId
from preble.engines.starting.launch import Fleet, LaunchOptions
from preble.gateway.server import serving
from support.dns_server import dns_server
from support.kubernetes_api import kubernetes_api
from support.waiting import eventually

Publish = Callable[[Sequence[str]], Awaitable[None]]
SETTINGS = FAST.replace("openai", "auto").replace("round_robin", "preble")
PROMPT = list(range(1000, 1320))


@asynccontextmanager
async def source(kind: str, folder: Path, urls: Sequence[str]) -> AsyncIterator[tuple[str, Publish]]:
    """The configuration that names these replicas through a source, and how to have it name others."""
    ports = {url: urlsplit(url).port for url in urls}
    file = folder / "preble.toml"

    def of_file(named: Sequence[str]) -> str:
        return f"replicas = {json.dumps(list(named))}\n{SETTINGS}"

    async def by_file(named: Sequence[str]) -> None:
        write(file, of_file(named))

    async with AsyncExitStack() as stack:
        if kind == "file":
            yield of_file(urls[:2]), by_file
        elif kind == "dns":
            server = await stack.enter_async_context(dns_server())
            server.records["replica.test.", "A"] = (1, ["127.0.0.1"])

            async def by_dns(named: Sequence[str]) -> None:
                targets = [f"0 1 {ports[url]} replica.test." for url in named]
                server.records["_http._tcp.test.", "SRV"] = (1, targets)

            await by_dns(urls[:2])
            group = f'[[groups]]\nsrv = "_http._tcp.test"\n[discovery]\ndns_server = "{server.address}"\n'
            yield SETTINGS.replace("[discovery]\n", group), by_dns
        else:
            api, kubeconfig = await stack.enter_async_context(kubernetes_api("pods", folder))

            async def by_kubernetes(named: Sequence[str]) -> None:
                for url in named:
                    if url not in api.objects:
                        await api.put(pod(url, ports[url]))
                for name in [name for name in api.objects if name not in named]:
                    await api.delete(name)

            await by_kubernetes(urls[:2])
            group = f'[[groups]]\npods = "app=x"\nnamespace = "prod"\n[discovery]\nkubeconfig = "{kubeconfig}"\n'
            yield SETTINGS.replace("[discovery]\n", group), by_kubernetes


def pod(name: str, port: int | None) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": name, "annotations": {"preble/port": str(port)}},
        "status": {"podIP": "127.0.0.1", "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }


async def placed(http: aiohttp.ClientSession) -> tuple[str, int]:
    """Where the prompt goes, and how much of it is believed to be cached there."""
    async with http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}, headers=AS_ADMIN) as answer:
        assert answer.status == 200, await answer.text()
        return answer.headers["x-preble-replica"], int(answer.headers["x-preble-matched-tokens"])


@pytest.mark.parametrize("kind", ["file", "dns", "kubernetes"])
async def test_replicas_that_come_and_go_cost_no_request_and_no_others_cache(kind: str, tmp_path: Path) -> None:
    launch = LaunchOptions(engine="emulator", replicas=3, log_dir=tmp_path / "logs", extra_args=("--model", "tiny"))
    async with Fleet(launch) as fleet, source(kind, tmp_path, fleet.urls) as (text, publish):
        first, second, third = fleet.urls
        write(tmp_path / "preble.toml", text)
        sources = ConfigSources(tmp_path / "preble.toml", {}, {})
        async with (
            serving(sources.load(), sources=sources) as gateway,
            aiohttp.ClientSession(gateway.url) as http,
        ):
            live, operator = gateway.serving.replicas, Operator(http)
            await eventually(lambda: live.keys() == {first, second})
            kept = live[ReplicaId(second)]
            async with steady(http) as stream:
                await operator.ask("POST", "/drain", url=first)
                assert (await placed(http))[0] == second
                await operator.ask("POST", "/undrain", url=first)
                await stream.reaches(first)
                await publish([second, third])
                await stream.reaches(third)
                await eventually(lambda: operator.is_in_state(first, None))
                await stream.leaves(first)
                await publish([second])
                await eventually(lambda: operator.is_in_state(third, None))
                await operator.ask("POST", body={"url": first})
                await stream.reaches(first)
            assert live.keys() == {first, second} and live[ReplicaId(second)] is kept
            replica, matched_tokens = await placed(http)
            assert replica == second and matched_tokens > 0, "what it caches is still known"
            await eventually(lambda: gateway.serving.num_in_flight == 0)
