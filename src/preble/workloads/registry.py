"""Workloads by name, or from a trace file in any format that `loaders.load` reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from preble.errors import ConfigError
from preble.workloads.generators.agent import agent
from preble.workloads.generators.longdoc import LONGDOC
from preble.workloads.generators.multiturn import multiturn
from preble.workloads.generators.programming import PROGRAMMING
from preble.workloads.generators.toolbench import TOOLBENCH
from preble.workloads.generators.unshared import unshared
from preble.workloads.generators.video import VIDEO
from preble.workloads.loaders import load
from preble.workloads.mix import parts_of
from preble.workloads.model import Workload
from preble.workloads.popularity import DEFAULT_ZIPF, Popularity
from preble.workloads.resample import resample
from preble.workloads.tool_use import tool_use

DEFAULT_TOOLS = 64
"""Of `tool_use`, unless asked otherwise."""


class Generator(Protocol):
    """Makes a workload without arrival times; the same arguments give the same workload.

    `popularity`, `num_prefixes`: None for the workload's own.
    """

    def __call__(
        self, num_requests: int, seed: int, *, popularity: Popularity | None = None, num_prefixes: int | None = None
    ) -> Workload: ...


def _tool_use(
    num_requests: int, seed: int, *, popularity: Popularity | None = None, num_prefixes: int | None = None
) -> Workload:
    """Its texts were never recorded with a popularity, so Zipf's law is its own."""
    a = DEFAULT_ZIPF if popularity is None or popularity.kind == "recorded" else popularity.a
    num_tools = DEFAULT_TOOLS if num_prefixes is None else num_prefixes
    return tool_use(num_requests, seed, zipf=a, num_prefixes=num_tools)


_GENERATORS: Mapping[str, Generator] = MappingProxyType(
    {
        "agent": agent,
        "longdoc": LONGDOC,
        "multiturn": multiturn,
        "programming": PROGRAMMING,
        "tool_use": _tool_use,
        "toolbench": TOOLBENCH,
        "unshared": unshared,
        "video": VIDEO,
    }
)


def workload_names() -> tuple[str, ...]:
    """The names that `make_workload` knows, sorted."""
    return tuple(sorted(_GENERATORS))


def is_endless(source: str) -> bool:
    """Whether the source has no end of its own, so that a number of requests is needed: a name, or a mix.

    >>> is_endless("video"), is_endless("toolbench+video"), is_endless("trace.jsonl")
    (True, True, False)
    """
    parts = parts_of(source)
    return len(parts) > 1 or parts[0].source in _GENERATORS


def make_workload(
    source: str,
    num_requests: int | None,
    seed: int,
    *,
    popularity: str | None = None,
    zipf: float | None = None,
    num_prefixes: int | None = None,
) -> Workload:
    """The workload of that name, or in that trace file. A name goes before a file; write ./NAME for the file.

    `num_requests`: None for all of a file. `popularity`: uniform, zipf or recorded; `zipf`: its exponent, which alone
    means zipf too. `num_prefixes`: how many different tools, documents or the like there are. None for each: the
    workload's own. A file is taken as it is, with its times, unless popularity or prefixes are asked for: then its
    requests are drawn anew (see `resample`).

    Raises: ConfigError: neither a name nor a file, or a number that cannot be. TraceFormatError: a bad file.
    """
    spread = Popularity.of(popularity, zipf)
    generator = _GENERATORS.get(source)
    if generator is not None:
        if num_requests is None:
            raise ConfigError(f"workload {source!r} goes on for ever; say how many requests")
        return generator(num_requests, seed, popularity=spread, num_prefixes=num_prefixes)
    path = Path(source)
    if len(parts_of(source)) > 1:
        raise ConfigError(f"the mix {source!r} needs times; write it to a file first: preble workload make --help")
    if not path.is_file():
        raise ConfigError(f"workload {source!r} is neither a file nor one of: {', '.join(workload_names())}")
    workload = load(path)
    if spread is not None or num_prefixes is not None:
        num_requests = num_requests or len(workload.requests)
        return resample(workload, num_requests, seed, popularity=spread, num_prefixes=num_prefixes)
    return workload if num_requests is None else workload.first(num_requests)
