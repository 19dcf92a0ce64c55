"""Recorded arrival times: the gaps of a trace, or of a range of it, at any rate."""

from __future__ import annotations

import re
from itertools import accumulate, cycle, islice, pairwise
from pathlib import Path

from preble.errors import ConfigError
from preble.lab.workloads.loaders import read_trace

_SLICE = re.compile(r"(?P<path>.+)\[(?P<first>\d*):(?P<end>\d*)\]")


def is_recording(text: str) -> bool:
    """Return whether `text` names a file, or a range of one."""
    return recording_file(text).is_file()


def recording_file(text: str) -> Path:
    """Return the file that `text` names, without its range.

    >>> recording_file("azure.csv[200:2200]").name
    'azure.csv'
    """
    return _parsed(text)[0]


def recorded_arrivals(text: str, num: int, rps: float | None) -> list[float]:
    """Return `num` ascending arrival times, the first at 0.0 s, with the gaps of a recorded trace in their order.

    `text`: a trace file with times, or a range of it, such as `azure.csv.gz[200:2200]`: requests 200 to 2199 in order
    of arrival, without those that have a parent. `rps`: scales the gaps so that the range has this mean rate, in
    requests a second; None keeps them. A range that is too short repeats from its beginning.

    Raises: ConfigError: no times in the file, no gap in the range, or an impossible rate. TraceFormatError: a file that
    is missing or bad.
    """
    path, stretch = _parsed(text)
    times_s = sorted(request.arrival_s for request in read_trace(path).openers if request.arrival_s is not None)
    if not times_s:
        raise ConfigError(f"recorded arrivals: {path} has no arrival times; choose a trace with times, or poisson")
    gaps_s = [later - earlier for earlier, later in pairwise(times_s[stretch])]
    if not gaps_s:
        raise ConfigError(f"recorded arrivals: {text} leaves fewer than two of {len(times_s)} arrivals; widen it")
    scale = 1.0 if rps is None else _scale(text, gaps_s, rps)
    return list(accumulate(islice(cycle([gap_s * scale for gap_s in gaps_s]), max(0, num - 1)), initial=0.0))[:num]


def _scale(text: str, gaps_s: list[float], rps: float) -> float:
    duration_s = sum(gaps_s)
    if rps <= 0:
        raise ConfigError(f"recorded arrivals: the rate must be positive, got {rps} requests/s")
    if duration_s <= 0:
        raise ConfigError(f"recorded arrivals: all of {text} arrive at once, without a rate; choose --arrivals burst")
    return len(gaps_s) / duration_s / rps


def _parsed(text: str) -> tuple[Path, slice]:
    """Return the file and the range; a file whose own name ends in brackets has no range."""
    match = None if Path(text).is_file() else _SLICE.fullmatch(text)
    if match is None:
        return Path(text), slice(None)
    first, end = (int(bound) if bound else None for bound in (match["first"], match["end"]))
    return Path(match["path"]), slice(first, end)
