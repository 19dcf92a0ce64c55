"""An adapter of somebody else's: the one of docs/howto/own-engine.md, through the gateway to a small server."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from preble.config import ReplicaConfig
from preble.core.types import ReplicaId
from preble.engines import Engine, HttpClient, connect, registry
from preble.errors import ConfigError
from preble.plugins import classes
from support.gateways import gateway_before
from support.web_app import listening

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "own-engine.md"


@pytest.fixture
def my_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module that the page shows, importable."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    module = ModuleType("my_engines")
    vars(module)["HttpClient"] = HttpClient
    exec(compile(blocks[0] + indent(blocks[-1], "    "), str(PAGE), "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "my_engines", module)
    yield module


@pytest.fixture
async def server() -> AsyncIterator[str]:
    """The URL of a server with endpoints of its own."""

    async def about(request: web.Request) -> web.Response:
        return web.json_response({"model": "m", "context": 100, "cache_tokens": 1000})

    async def ping(request: web.Request) -> web.Response:
        return web.Response(text="pong")

    async def complete(request: web.Request) -> web.Response:
        prompt = (await request.json())["prompt"]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 1, "total_tokens": len(prompt) + 1}
        return web.json_response({"choices": [{"index": 0, "text": str(prompt)}], "usage": usage})

    app = web.Application()
    app.router.add_get("/about", about)
    app.router.add_get("/ping", ping)
    app.router.add_post("/api/v1/completions", complete)
    async with listening(app) as url:
        yield url


async def answered(url: str, engine: str) -> dict[str, Any]:
    """What a client of the gateway gets from this server, with this adapter."""
    async with (
        gateway_before([ReplicaConfig(url)], engine=engine, policy="round_robin") as gateway,
        aiohttp.ClientSession(gateway.url) as http,
        http.post("/v1/completions", json={"model": "m", "prompt": [1, 2, 3]}) as answer,
    ):
        assert answer.status == 200, await answer.text()
        body: dict[str, Any] = await answer.json()
    return body


async def test_an_adapter_named_by_its_class_serves(my_engines: ModuleType, server: str) -> None:
    assert (await answered(server, "my_engines:MyEngine"))["choices"][0]["text"] == "[1, 2, 3]"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, my_engines: ModuleType) -> None:
    """A package is installed that names the adapter `mine`."""
    point = EntryPoint("mine", "my_engines:MyEngine", registry.ENTRY_POINTS)

    def entry_points(**select: str) -> EntryPoints:
        return EntryPoints((point,)).select(**select)

    monkeypatch.setattr(classes, "entry_points", entry_points)


@pytest.mark.parametrize("engine", ["mine", "auto"])
async def test_an_installed_adapter_serves_by_its_name_and_is_found(installed: None, server: str, engine: str) -> None:
    assert (await answered(server, engine))["choices"][0]["text"] == "[1, 2, 3]"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("my_engines:Nothing", "the module my_engines has no class 'Nothing'"),
        ("no_such_module:MyEngine", "there is no module 'no_such_module' in "),
        ("my_engines:About", "is no subclass of preble.engines.Engine"),
    ],
)
def test_an_adapter_that_is_none_is_refused(my_engines: ModuleType, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        connect("http://127.0.0.1:1", name)


def test_an_unknown_name_is_answered_with_the_installed_ones(installed: None) -> None:
    with pytest.raises(ConfigError, match="known: auto, vllm, sglang, openai, mine, or your own as module:Class"):
        connect("http://127.0.0.1:1", "yours")


async def test_an_adapter_has_every_capability_by_default(my_engines: ModuleType, server: str) -> None:
    engine: Engine = my_engines.MyEngine(HttpClient(server, ReplicaId("r")))
    await engine.follow_kv_events(pytest.fail)
    assert engine.loads() is None
    engine.resync_kv_events()
    await engine.close()
