"""Workloads by name, or from a trace file in any format that `read_trace` reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from preble.errors import ConfigError
from preble.lab.workloads.generators.beyond_paper import multiturn, unshared
from preble.lab.workloads.generators.coding import coding
from preble.lab.workloads.generators.paper import AGENT, LONGDOC, PROGRAMMING, TOOLBENCH, VIDEO
from preble.lab.workloads.generators.pieces import Asked
from preble.lab.workloads.generators.shared_prefix import SharedPrefix
from preble.lab.workloads.loaders import read_trace
from preble.lab.workloads.mix import parts_of
from preble.lab.workloads.model import Workload
from preble.lab.workloads.popularity import DEFAULT_ZIPF, Popularity
from preble.lab.workloads.resample import resample
from preble.lab.workloads.streams import is_scenario
from preble.lab.workloads.tool_use import tool_use

DEFAULT_TOOLS = 64
"""The number of tools in `tool_use` when none is given."""

USUAL_REQUESTS = 2000


def _tool_use(asked: Asked) -> Workload:
    """Call `tool_use` with Zipf's law by default: its texts have no recorded popularity."""
    a = DEFAULT_ZIPF if asked.popularity is None or asked.popularity.kind == "recorded" else asked.popularity.a
    num_tools = DEFAULT_TOOLS if asked.num_prefixes is None else asked.num_prefixes
    return tool_use(asked.num_requests, asked.seed, zipf=a, num_prefixes=num_tools)


_GENERATORS: Mapping[str, Callable[[Asked], Workload]] = MappingProxyType(
    {
        "agent": AGENT,
        "coding": coding,
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
    """Return the names that `make_workload` accepts, sorted."""
    return tuple(sorted(_GENERATORS))


def is_endless(source: str) -> bool:
    """Return whether the source has no end, so that the caller must give a number of requests: a name or a mix.

    >>> is_endless("video"), is_endless("toolbench+video"), is_endless("trace.jsonl")
    (True, True, False)
    """
    parts = parts_of(source)
    return len(parts) > 1 or parts[0].source in _GENERATORS or is_scenario(source)


def usual_prefixes(source: str) -> int | None:
    """Return how many tools, documents or the like a workload of `USUAL_REQUESTS` requests has, where that depends on
    them.

    A population for runs of any length: with as many as each run's own requests ask for, a longer run would be another
    workload, of which less fits into the caches. None where it does not depend on them, and for mixes and files.

    >>> usual_prefixes("toolbench"), usual_prefixes("unshared")
    (48, None)
    """
    generator = _GENERATORS.get(source)
    return round(USUAL_REQUESTS / generator.uses.mean) if isinstance(generator, SharedPrefix) else None


def make_workload(
    source: str,
    num_requests: int | None,
    seed: int,
    *,
    popularity: str | None = None,
    zipf: float | None = None,
    num_prefixes: int | None = None,
) -> Workload:
    """Return the workload of that name, or of that trace file. A name wins over a file: write ./NAME for the file.

    `num_requests`: None for all of a file. `popularity`: uniform, zipf or recorded. `zipf`: the exponent, which also
    selects zipf. `num_prefixes`: the number of different tools, documents or the like. None: the workload's default.
    A file keeps its requests and times unless popularity or prefixes are given: then its requests are resampled (see
    `resample`). Of a longer file, fewer requests are a stretch that begins at a place of the seed's.

    Raises: ConfigError: neither a name nor a file, or an impossible number. TraceFormatError: a bad file.
    """
    spread = Popularity.of(popularity, zipf)
    generator = _GENERATORS.get(source)
    if generator is not None:
        if num_requests is None:
            raise ConfigError(f"workload {source!r} has no end; give the number of requests")
        return generator(Asked(num_requests, seed, spread, num_prefixes))
    path = Path(source)
    if len(parts_of(source)) > 1:
        raise ConfigError(f"the mix {source!r} needs times; write it to a file first: preble workload make --help")
    if not path.is_file():
        raise ConfigError(f"workload {source!r} is neither a file nor one of: {', '.join(workload_names())}")
    workload = read_trace(path)
    if spread is not None or num_prefixes is not None:
        num_requests = num_requests or len(workload.requests)
        return resample(workload, num_requests, seed, popularity=spread, num_prefixes=num_prefixes)
    return workload if num_requests is None else workload.stretch(num_requests, random.Random(f"stretch/{seed}"))
