"""The emulated replica's metrics under vLLM's names, read from the engine when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from preble.emulator.engine import EmulatedEngine
from preble.emulator.pairs.decoding import Decode
from preble.emulator.pairs.rooms import Prefill

_LABELS = ("model_name", "engine")
Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)


class MetricsPage(Collector):
    """The counters and gauges of each rank, labelled as vLLM labels them, and the text that Prometheus scrapes."""

    def __init__(
        self, engines: Sequence[EmulatedEngine], model: str, block_size: int, role: Prefill | Decode | None = None
    ) -> None:
        """`engines`: one for each rank. `block_size`: what to say of it. `role`: its side of a pair."""
        self._role = role
        self._engines = engines
        self._model = model
        self._block_size = str(block_size)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        gauges: dict[tuple[str, str], Callable[[EmulatedEngine], float]] = {
            ("num_requests_running", "Requests that run."): lambda e: e.scheduler.num_running,
            ("num_requests_waiting", "Requests that wait."): lambda e: e.scheduler.num_waiting,
            ("kv_cache_usage_perc", "KV blocks in use; 1 is all of them."): lambda e: e.kv_cache_usage,
        }
        counters: dict[tuple[str, str], Callable[[EmulatedEngine], float]] = {
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."): lambda e: (
                e.scheduler.stats.prefix_queries
            ),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache."): lambda e: e.scheduler.stats.prefix_hits,
            ("num_preemptions", "Preemptions."): lambda e: e.scheduler.stats.preemptions,
            ("prompt_tokens", "Prompt tokens of requests that have started."): lambda e: (
                e.scheduler.stats.prefix_queries
            ),
            ("prompt_tokens_cached", "Prompt tokens that were cached."): lambda e: e.scheduler.stats.prefix_hits,
            ("generation_tokens", "Tokens generated."): lambda e: e.scheduler.stats.generated_tokens,
        }
        for (name, text), gauge in gauges.items():
            yield self._of_each(GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS), gauge)
        for (name, text), counter in counters.items():
            yield self._of_each(CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS), counter)
        if self._role is None:  # by which vLLM is recognised
            yield self._cache_config()
        yield self._by_label(
            "prompt_tokens_by_source",
            "source",
            {
                "local_compute": lambda e: e.scheduler.stats.prefix_queries - e.scheduler.stats.prefix_hits,
                "local_cache_hit": lambda e: e.reused_tokens,
                "external_kv_transfer": lambda e: e.reused_copied_tokens,
            },
        )
        if self._engines[0].kept is not None:
            name, text = "vllm:nixl_bytes_transferred_sum", "Bytes of KV that were fetched."
            yield self._of_each(GaugeMetricFamily(name, text, labels=_LABELS), lambda engine: engine.copied_bytes)
        if self._engines[0].peers is not None:
            yield self._by_label("kv_offload_tiering_read_bytes", "tier", {"1:p2p": lambda e: e.copied_bytes})
            yield self._by_label("prompt_tokens_cached_by_source", "source", {"p2p": lambda e: e.copied_tokens})

        if self._role is not None:
            yield from self._of_pairs(self._role)

    def _of_pairs(self, role: Prefill | Decode) -> Iterator[Metric]:
        """Yield what SGLang counts of pairs, under its names."""
        waits, fails = (
            ("prefill_bootstrap", "bootstrap") if isinstance(role, Prefill) else ("decode_transfer", "transfer")
        )
        labels, values = ("model_name",), (self._model,)
        waiting = GaugeMetricFamily(f"sglang:num_{waits}_queue_reqs", "Wait for the other leg.", labels=labels)
        waiting.add_metric(values, role.num_waiting)
        failed = CounterMetricFamily(f"sglang:num_{fails}_failed_reqs", "Failed with the other leg.", labels=labels)
        failed.add_metric(values, role.num_failed)
        yield waiting
        yield failed

    def _of_each(self, family: Family, value: Callable[[EmulatedEngine], float]) -> Family:
        for rank, engine in enumerate(self._engines):
            family.add_metric((self._model, str(rank)), value(engine))
        return family

    def _by_label(self, name: str, label: str, values: Mapping[str, Callable[[EmulatedEngine], float]]) -> Metric:
        """Return a counter with one label more, by that label's values."""
        family = CounterMetricFamily(f"vllm:{name}", f"By {label}.", labels=(*_LABELS, label))
        for rank, engine in enumerate(self._engines):
            for given, value in values.items():
                family.add_metric((self._model, str(rank), given), value(engine))
        return family

    def _cache_config(self) -> Metric:
        labels = (*_LABELS, "block_size", "num_gpu_blocks")
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=labels)
        of_all = str(sum(engine.num_blocks for engine in self._engines))  # in each rank's series, as vLLM has it
        for rank, _ in enumerate(self._engines):
            family.add_metric((self._model, str(rank), self._block_size, of_all), 1)
        return family
