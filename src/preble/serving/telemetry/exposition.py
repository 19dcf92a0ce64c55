"""The numbers in Prometheus' text form.

`prometheus_client` would take several times as long for each line, and the gateway serves nothing else while it writes
a scrape of 400 replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from math import inf

from preble.serving.telemetry.numbers import Cell, Reading, add, total
from preble.serving.telemetry.table import TABLE, Declared, Kind

Series = Mapping[tuple[str, ...], Cell]
_OTHERS_MODEL = "model_name"
"""vLLM's name of our label `model`."""


def in_text(states: Iterable[Iterable[Reading]], *, per_replica: bool = True, vllm_names: bool = False) -> str:
    """Return every metric of the table, summed over processes.

    `states`: each process's numbers. `per_replica`: each replica's, or else their sums. `vllm_names`: give the metrics
    that mean the same vLLM's names as well.
    """
    totals = total(states)
    lines: list[str] = []
    for declared in TABLE:
        if per_replica or "replica" not in declared.labels:
            lines += _family(declared.name, declared, declared.labels, totals[declared.name])
        elif declared.adds_up:
            labels = tuple(label for label in declared.labels if label != "replica")
            lines += _family(declared.name, declared, labels, _sums(declared, labels, totals[declared.name]))
    for declared in TABLE if vllm_names else ():
        if declared.same_as:
            lines += _as_vllm(declared, totals)
    return "\n".join(lines) + "\n"


def _family(name: str, declared: Declared, labels: tuple[str, ...], series: Series) -> Iterator[str]:
    yield f"# HELP {name} {declared.text}"
    yield f"# TYPE {name} {declared.kind}"
    order = sorted(range(len(labels)), key=labels.__getitem__)
    for values, cell in series.items():
        inside = ",".join(f'{labels[i]}="{_escaped(values[i])}"' for i in order)
        if declared.kind is Kind.HISTOGRAM:
            yield from _histogram(name, inside, declared.bounds, cell)
        else:
            yield f"{name}{_braced(inside)} {cell[0]!r}"


def _histogram(name: str, inside: str, bounds: tuple[float, ...], cell: Cell) -> Iterator[str]:
    counts = list(accumulate(cell[:-1]))
    rest = f",{inside}" if inside else ""
    for bound, count in zip((*bounds, inf), counts, strict=True):
        yield f'{name}_bucket{{le="{"+Inf" if bound == inf else bound}"{rest}}} {count!r}'
    yield f"{name}_count{_braced(inside)} {counts[-1]!r}"
    yield f"{name}_sum{_braced(inside)} {cell[-1]!r}"


def _as_vllm(declared: Declared, totals: Mapping[str, Series]) -> Iterator[str]:
    """Return the metric under the name that vLLM has for it: by model, whatever the replica; a ratio is the replicas'
    mean.
    """
    series, labels = totals[declared.name], tuple(label for label in declared.labels if label == "model")
    sums = _sums(declared, labels, series)
    if declared.name.endswith("_ratio"):
        sums = {key: [cell[0] / len(series)] for key, cell in sums.items()}
    return _family(declared.same_as, declared, (_OTHERS_MODEL,) if labels else (), sums)


def _sums(declared: Declared, labels: tuple[str, ...], series: Series) -> dict[tuple[str, ...], Cell]:
    """Return the sums of a metric's series that agree in some of its labels."""
    kept = [declared.labels.index(label) for label in labels]
    sums: dict[tuple[str, ...], Cell] = {}
    for values, cell in series.items():
        add(sums.setdefault(tuple(values[at] for at in kept), [0.0] * declared.cell_size), cell)
    return sums


def _braced(inside: str) -> str:
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str) -> str:
    r"""Return a label's value as Prometheus reads it.

    >>> _escaped('a"b\\c\n')
    'a\\"b\\\\c\\n'
    """
    if '"' in value or "\\" in value or "\n" in value:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return value
