"""The emulated replica's metrics under vLLM's names, read from the engine when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from preble.engines.emulator.engine import EmulatedEngine


class EngineCollector(Collector):
    """One engine's counters and gauges, labelled as vLLM labels them."""

    def __init__(self, engine: EmulatedEngine, model: str) -> None:
        self._engine = engine
        self._labels = {"model_name": model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        engine, stats = self._engine, self._engine.stats
        yield self._gauge("num_requests_running", "Requests that run.", engine.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait.", engine.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use; 1 is all of them.", engine.kv_cache_usage)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits)
        yield self._counter("num_preemptions", "Preemptions.", stats.preemptions)
        yield self._counter("prompt_tokens", "Prompt tokens of requests that have started.", stats.prefix_queries)
        yield self._counter("prompt_tokens_cached", "Prompt tokens that were cached.", stats.prefix_hits)
        yield self._counter("generation_tokens", "Tokens generated.", stats.generated_tokens)
        cache = {"block_size": str(engine.block_size), "num_gpu_blocks": str(engine.num_blocks)}
        yield self._gauge("cache_config_info", "The KV cache.", 1, cache)

    def _gauge(self, name: str, text: str, value: float, more: dict[str, str] | None = None) -> Metric:
        labels = self._labels | (more or {})
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


class MetricsPage:
    """The text that Prometheus scrapes."""

    def __init__(self, engine: EmulatedEngine, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine, model))

    def render(self) -> bytes:
        return generate_latest(self._registry)
