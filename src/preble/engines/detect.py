"""From a URL to the client that fits the program behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Literal, get_args

from preble.core.types import KvEvent, ReplicaId
from preble.engines.adapter import Engine, EngineInfo, EngineLoad, EngineResponse
from preble.engines.http import HttpClient, HttpTimeouts
from preble.engines.kv_events import KvEventEndpoints
from preble.engines.openai import OpenAIEngine
from preble.engines.sglang import OWNER as SGLANG
from preble.engines.sglang import SglangEngine
from preble.engines.vllm import EMULATED_HEADER, VllmEngine
from preble.errors import ConfigError

EngineKind = Literal["auto", "vllm", "sglang", "openai"]


def connect(
    url: str,
    engine: EngineKind = "auto",
    *,
    replica_id: ReplicaId | None = None,
    api_key: str | None = None,
    timeouts: HttpTimeouts | None = None,
    kv_events: KvEventEndpoints | None = None,
) -> Engine:
    """The client of the replica at `url`. Opens no connection: the replica may be down.

    `engine`: its program; "auto" asks it at each probe. `replica_id`: the URL where not given. `kv_events`: where its
    KV events are, for an engine that cannot tell.

    Raises: ConfigError: the URL or the engine's name is unusable.
    """
    http = HttpClient(url, replica_id or ReplicaId(url), api_key=api_key, timeouts=timeouts)
    match engine:
        case "auto":
            return AutoEngine(http, kv_events)
        case "vllm":
            return VllmEngine(http, kv_events)
        case "sglang":
            return SglangEngine(http, kv_events)
        case "openai":
            return OpenAIEngine(http)
    raise ConfigError(f"unknown engine {engine!r}; known: {', '.join(get_args(EngineKind))}")


class AutoEngine:
    """The client of a replica whose program is found out at each probe: after a restart it may be another one."""

    def __init__(self, http: HttpClient, kv_events: KvEventEndpoints | None) -> None:
        self._http = http
        self._openai = OpenAIEngine(http)
        self._vllm = VllmEngine(http, kv_events)
        self._sglang = SglangEngine(http, kv_events)
        self._found: Engine = self._openai

    @property
    def replica_id(self) -> ReplicaId:
        return self._http.replica_id

    @property
    def url(self) -> str:
        return self._http.url

    async def probe(self) -> EngineInfo:
        """Find out the program and ask it. Raises: EngineError."""
        self._found = await self._find_out()
        return await self._found.probe()

    async def _find_out(self) -> Engine:
        if await self._openai.owner() == SGLANG:
            return self._sglang
        return self._vllm if await self._speaks_vllm() else self._openai

    async def _speaks_vllm(self) -> bool:
        """Only vLLM and the emulator have metrics of vLLM's names."""
        answer = await self._http.ask("/metrics")
        return EMULATED_HEADER in answer.headers or (
            answer.status == 200 and b"vllm:cache_config_info" in answer.content
        )

    async def check_ready(self) -> None:
        await self._found.check_ready()

    def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> AbstractAsyncContextManager[EngineResponse]:
        return self._found.send(path, body, headers)

    async def tokenize(self, body: bytes) -> list[int]:
        return await self._found.tokenize(body)

    def kv_events(self) -> AsyncIterator[KvEvent] | None:
        """Of the program found by the last probe; None before any."""
        return self._found.kv_events()

    def resync_kv_events(self) -> None:
        self._found.resync_kv_events()

    def loads(self) -> AsyncIterator[EngineLoad | None] | None:
        """Of the program found by the last probe; None before any."""
        return self._found.loads()

    async def close(self) -> None:
        await self._sglang.close()
        await self._vllm.close()
