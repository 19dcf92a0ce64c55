"""The numbers in Prometheus' form: a collector that reads them at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from preble.serving.telemetry.numbers import Cell, Reading, add, total
from preble.serving.telemetry.table import TABLE, Declared, Kind

Series = Mapping[tuple[str, ...], Cell]
_OTHERS_MODEL = "model_name"
"""vLLM's name of our label `model`."""


class NumbersCollector(Collector):
    """Every metric of the table, summed over processes."""

    def __init__(self, states: Callable[[], Iterable[Iterable[Reading]]], *, vllm_names: bool = False) -> None:
        """`states`: each process's numbers. `vllm_names`: give the metrics that mean the same vLLM's names as well."""
        self._states = states
        self.vllm_names = vllm_names

    def describe(self) -> Iterator[Metric]:
        """Return nothing, so that registering reads no number."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        totals = total(self._states())
        for declared in TABLE:
            yield _family(declared.name, declared, declared.labels, totals[declared.name])
        if self.vllm_names:
            for declared in TABLE:
                if declared.same_as:
                    yield _as_vllm(declared, totals)


def _family(name: str, declared: Declared, labels: tuple[str, ...], series: Series) -> Metric:
    family = Metric(name.removesuffix("_total"), declared.text, declared.kind)
    for values, cell in series.items():
        of_series = dict(zip(labels, values, strict=True))
        if declared.kind is not Kind.HISTOGRAM:
            family.add_sample(name, of_series, cell[0])
            continue
        counts = list(accumulate(cell[:-1]))
        for bound, count in zip((*declared.bounds, float("inf")), counts, strict=True):
            family.add_sample(f"{name}_bucket", {**of_series, "le": _shown(bound)}, count)
        family.add_sample(f"{name}_count", of_series, counts[-1])
        family.add_sample(f"{name}_sum", of_series, cell[-1])
    return family


def _as_vllm(declared: Declared, totals: Mapping[str, Series]) -> Metric:
    """The metric under the name that vLLM has for it: by model, whatever the replica; a ratio is the replicas' mean."""
    series = totals[declared.name]
    has_model = "model" in declared.labels
    at = declared.labels.index("model") if has_model else 0
    sums: dict[tuple[str, ...], Cell] = {}
    for values, cell in series.items():
        key = (values[at],) if has_model else ()
        add(sums.setdefault(key, [0.0] * declared.cell_size), cell)
    if declared.name.endswith("_ratio"):
        sums = {key: [cell[0] / len(series)] for key, cell in sums.items()}
    return _family(declared.same_as, declared, (_OTHERS_MODEL,) if has_model else (), sums)


def _shown(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(bound)
