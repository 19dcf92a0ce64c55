"""Workloads by name, or from a trace file in any format that `loaders.load` reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from preble.errors import ConfigError
from preble.workloads.loaders import load
from preble.workloads.model import Workload
from preble.workloads.tool_use import tool_use


class Generator(Protocol):
    """Makes a workload without arrival times; the same arguments give the same workload."""

    def __call__(self, num_requests: int, seed: int, *, zipf: float = ..., num_prefixes: int = ...) -> Workload: ...


_GENERATORS: Mapping[str, Generator] = MappingProxyType({"tool_use": tool_use})


def workload_names() -> tuple[str, ...]:
    """The names that `make_workload` knows, sorted."""
    return tuple(sorted(_GENERATORS))


def make_workload(
    source: str, num_requests: int | None, seed: int, *, zipf: float = 1.1, num_prefixes: int = 64
) -> Workload:
    """The workload of that name, or in that trace file. A name goes before a file; write ./NAME for the file.

    `num_requests`: None for all of a file. `seed`, `zipf` (popularity skew) and `num_prefixes` (how many
    different tools, documents or the like there are) are for named workloads; a file is as it is.

    Raises: ConfigError: neither a name nor a file, or a number that cannot be. TraceFormatError: a bad file.
    """
    generator = _GENERATORS.get(source)
    if generator is not None:
        if num_requests is None:
            raise ConfigError(f"workload {source!r} goes on for ever; say how many requests")
        return generator(num_requests, seed, zipf=zipf, num_prefixes=num_prefixes)
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"workload {source!r} is neither a file nor one of: {', '.join(workload_names())}")
    workload = load(path)
    return workload if num_requests is None else workload.first(num_requests)
