"""Mixes of workloads: sources such as `toolbench:2+video@azure.csv`, and their merged requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from preble.errors import ConfigError
from preble.lab.workloads.model import Workload, WorkloadRequest

_PART = re.compile(r"(?P<source>[^@]+?)(?::(?P<share>\d+(?:\.\d*)?|\.\d+))?(?:@(?P<arrivals>.+))?")


@dataclass(frozen=True, slots=True)
class Part:
    """One workload of a mix.

    `source`: its name or file. `share`: of the requests, relative to the other shares. `arrivals`: its own; None for
    those of the mix.
    """

    source: str
    share: float = 1.0
    arrivals: str | None = None


def parts_of(source: str) -> tuple[Part, ...]:
    """Return the parts of `NAME|FILE[:SHARE][@ARRIVALS]+…`; if a file has this whole name, it is the only part.

    Raises: ConfigError: an empty part, or a share that is not positive.

    >>> parts_of("toolbench:0.5+video@gamma")
    (Part(source='toolbench', share=0.5, arrivals=None), Part(source='video', share=1.0, arrivals='gamma'))
    """
    if Path(source).is_file():
        return (Part(source),)
    return tuple(_part(text, source) for text in source.split("+"))


def mixed(name: str, parts: Sequence[Workload]) -> Workload:
    """Merge workloads with arrival times into one: sessions in order of arrival.

    Ids of requests and sessions get the number of their part in front, because parts may use the same ids.
    """
    sessions = [session for i, part in enumerate(parts) for session in _numbered(i, part)]
    sessions.sort(key=lambda session: session[0].arrival_s or 0.0)
    requests = tuple(request for session in sessions for request in session)
    return Workload(name, requests, " + ".join(part.note or part.name for part in parts))


def part_number(request: WorkloadRequest) -> int:
    """Return which part of a mix a request is of, from 0."""
    return int(request.request_id.partition(":")[0])


def _part(text: str, source: str) -> Part:
    match = _PART.fullmatch(text)
    if match is None:
        raise ConfigError(f"workload {source!r}: {text!r} is not of the form NAME|FILE[:SHARE][@ARRIVALS]")
    share = float(match["share"] or 1.0)
    if share <= 0:
        raise ConfigError(f"workload {source!r}: the share of {match['source']!r} must be positive, got {share:g}")
    return Part(match["source"], share, match["arrivals"])


def _numbered(number: int, workload: Workload) -> list[tuple[WorkloadRequest, ...]]:
    """Return the sessions of a part, with its number in front of every id."""
    requests = (
        replace(
            request,
            request_id=f"{number}:{request.request_id}",
            session=request.session and f"{number}:{request.session}",
            parent=request.parent and f"{number}:{request.parent}",
        )
        for request in workload.requests
    )
    return replace(workload, requests=tuple(requests)).sessions()
