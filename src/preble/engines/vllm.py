"""The client of one vLLM replica: configures itself by asking, and knows what the replica caches from its KV events.

The emulator speaks the same dialect and says that it is one in a header.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from ipaddress import ip_address

import msgspec
import structlog
from prometheus_client.parser import text_string_to_metric_families

from preble.core.types import KvEvent, ReplicaSpec
from preble.engines.adapter import EngineInfo
from preble.engines.http import HttpAnswer, HttpClient
from preble.engines.kv_events import KvEventEndpoints, KvEventStream
from preble.engines.openai import OpenAIEngine, adapters_among
from preble.errors import ConfigError, EngineProtocolError

EMULATED_HEADER = "X-Preble-Emulated"
CACHE_CONFIG_METRIC = "vllm:cache_config_info"
DEFAULT_BLOCK_SIZE = 16


class VersionAnswer(msgspec.Struct):
    version: str


class EventSource(msgspec.Struct):
    """Where one data-parallel rank publishes its KV events."""

    endpoint: str | None = None
    enable_kv_cache_events: bool = True
    publisher: str | None = "zmq"
    replay_endpoint: str | None = None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What the replica says of its KV cache. `num_blocks` counts those that can hold tokens."""

    block_size: int
    num_blocks: int | None

    @property
    def capacity_tokens(self) -> int | None:
        return None if self.num_blocks is None else self.num_blocks * self.block_size


class VllmEngine(OpenAIEngine):
    """The client of one vLLM (or emulated) replica."""

    def __init__(self, http: HttpClient, endpoints: KvEventEndpoints | None = None) -> None:
        """`endpoints`: where its KV events are; None asks the replica (vLLM 0.32 and later can tell)."""
        super().__init__(http)
        self._given_endpoints = endpoints
        self._endpoints: KvEventEndpoints | None = endpoints
        self._streams: list[KvEventStream] = []
        self._log = structlog.get_logger("preble.engines.vllm").bind(replica=self.replica_id)

    async def probe(self) -> EngineInfo:
        """Ask what it serves, how large its cache is and where its KV events are. Raises: EngineError."""
        models = await self._models()
        version = await self._http.ask("/version")
        emulated = EMULATED_HEADER in version.headers
        cache = await self._cache_config(emulated)
        self._endpoints = self._given_endpoints or await self._ask_endpoints()
        max_model_len = models[0].max_model_len
        return EngineInfo(
            engine="emulator" if emulated else "vllm",
            models=tuple(model.id for model in models),
            spec=ReplicaSpec(
                self.replica_id,
                kv_capacity_tokens=cache.capacity_tokens,
                max_prompt_tokens=max_model_len,
                block_size=cache.block_size,
                reports_events=self._endpoints is not None,
            ),
            max_model_len=max_model_len,
            adapters=adapters_among(models),
            version=version.decode(VersionAnswer).version if version.status == 200 else None,
        )

    @property
    def kv_event_endpoints(self) -> KvEventEndpoints | None:
        """Where its KV events are, as given or as the last probe found out; None where it has none."""
        return self._endpoints

    async def check_ready(self) -> None:
        """Return if the engine behind the HTTP server lives. Raises: EngineError."""
        (await self._http.ask("/health")).require_ok()

    async def _cache_config(self, emulated: bool) -> CacheConfig:
        answer = await self._http.ask("/metrics")
        if answer.status != 200:
            self._log.warning("no_metrics", status=answer.status, consequence="size of the KV cache is unknown")
            return CacheConfig(DEFAULT_BLOCK_SIZE, None)
        return read_cache_config(answer.content.decode(errors="replace"), has_null_block=not emulated)

    async def _ask_endpoints(self) -> KvEventEndpoints | None:
        answer = await self._http.ask("/kv_event_sources")
        if answer.status in (404, 405):
            self._log.warning("kv_events_unknown", hint="this vLLM cannot tell; give kv_events for this replica")
            return None
        return self._endpoints_from(answer)

    def _endpoints_from(self, answer: HttpAnswer) -> KvEventEndpoints | None:
        """Raises: EngineError: the answer is not the documented one."""
        sources: dict[str, EventSource] = answer.decode(dict[str, EventSource])
        live = [s for s in sources.values() if s.enable_kv_cache_events and s.publisher == "zmq" and s.endpoint]
        if len(live) != 1:
            reason = "it has data-parallel ranks, each with a cache of its own" if live else "they are off"
            self._log.warning("no_kv_events", reason=reason, consequence="what it caches is a belief")
            return None
        [source] = live
        endpoint, replay = (
            address and reachable(address, self._http.host) for address in (source.endpoint, source.replay_endpoint)
        )
        try:
            return KvEventEndpoints(endpoint or "", replay, source.topic)
        except ConfigError as error:
            raise self._http.error(EngineProtocolError, f"tells a wrong address: {error}") from error

    def kv_events(self) -> AsyncIterator[KvEvent] | None:
        if self._endpoints is None:
            return None
        stream = KvEventStream(self.replica_id, self._endpoints)
        self._streams = [other for other in self._streams if not other.closed]
        self._streams.append(stream)
        return stream.events()

    def resync_kv_events(self) -> None:
        for stream in self._streams:
            stream.resync()

    async def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        await super().close()


def read_cache_config(metrics: str, *, has_null_block: bool) -> CacheConfig:
    """Block size and number of blocks from Prometheus text; defaults where they are missing.

    `has_null_block`: one of the reported blocks is a placeholder that never holds tokens, as in vLLM.
    """
    # Only this metric's lines: parsing all of a busy engine's histograms would take tens of milliseconds.
    lines = [line for line in metrics.splitlines() if line.startswith(CACHE_CONFIG_METRIC)]
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            block_size = positive(sample.labels.get("block_size")) or DEFAULT_BLOCK_SIZE
            blocks = positive(sample.labels.get("num_gpu_blocks"))
            usable = blocks - 1 if blocks and has_null_block else blocks
            return CacheConfig(block_size, usable or None)
    return CacheConfig(DEFAULT_BLOCK_SIZE, None)


def positive(label: str | None) -> int | None:
    """A label's value if it is a positive whole number.

    >>> positive("32"), positive("None"), positive("0"), positive(None)
    (32, None, None, None)
    """
    return int(label) if label and label.isascii() and label.isdigit() and int(label) > 0 else None


def reachable(endpoint: str, host: str) -> str:
    """The address to connect to for an endpoint that a replica on `host` binds.

    >>> reachable("tcp://*:5557", "10.0.0.5"), reachable("tcp://0.0.0.0:5557", "::1")
    ('tcp://10.0.0.5:5557', 'tcp://[::1]:5557')
    >>> reachable("tcp://10.0.0.9:5557", "10.0.0.5"), reachable("ipc:///run/events", "10.0.0.5")
    ('tcp://10.0.0.9:5557', 'ipc:///run/events')
    """
    if not endpoint.startswith("tcp://"):
        return endpoint
    bound, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if bound not in ("*", "0.0.0.0", "[::]", "::"):
        return endpoint
    return f"tcp://{bracketed(host)}:{port}"


def bracketed(host: str) -> str:
    try:
        return f"[{host}]" if ip_address(host).version == 6 else host
    except ValueError:
        return host
