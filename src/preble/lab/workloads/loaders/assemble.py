"""What every reader does with the requests it found: names, times from the start of the file, the workload."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from preble.errors import TraceFormatError
from preble.lab.workloads.model import Segment, Workload, WorkloadRequest
from preble.lab.workloads.trace import made_up_tokens, own_tokens

_SUFFIXES = (".gz", ".jsonl", ".json", ".csv", ".txt", ".requests")
_FINER_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))
"""(From this Unix time on, units per second), the finest first: 1e11 s would be the year 5138, and
1e11 ms is in 1973."""


def workload_name(path: Path) -> str:
    """Return the file's name without what says how it is written.

    >>> workload_name(Path("traces/video.requests.jsonl.gz"))
    'video'
    """
    name = path.name
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name or path.name


def assembled(path: Path, requests: Iterable[WorkloadRequest], note: str) -> Workload:
    """Return the workload of a file: by arrival where there are times, which then count from the first one.

    Raises: TraceFormatError: there is no request.
    """
    found = _from_the_first(sorted(requests, key=lambda request: request.arrival_s or 0.0))
    if not found:
        raise TraceFormatError(f"{path}: there is no request in it; is it the whole file?")
    return Workload(workload_name(path), tuple(found), f"{path.name} of {len(found)} requests; {note}")


class MadeUpSegments:
    """Segments of made-up tokens for content that is not known: each is made once, and shared by those who ask."""

    def __init__(self) -> None:
        self._segments: dict[tuple[str, int], Segment] = {}

    def beginning(self, segment_id: str, num_tokens: int, whole: int) -> Segment:
        """Return the first `num_tokens` of the `whole` of a segment; a cut one has its own id, for an id has one
        content.
        """
        key = (segment_id, num_tokens)
        if key not in self._segments:
            name = segment_id if num_tokens == whole else f"{segment_id}[:{num_tokens}]"
            self._segments[key] = Segment(name, tokens=made_up_tokens(segment_id, num_tokens))
        return self._segments[key]


def own_segment(request_id: str, num_tokens: int) -> Segment:
    """Return a piece of prompt that no other request has, of made-up tokens."""
    return Segment(tokens=own_tokens(request_id, num_tokens))


def seconds_of(time: float | str) -> float:
    """Return seconds since 1970, of an ISO 8601 time (UTC where it does not say) or of Unix time.

    Unix time may be in seconds, milliseconds, microseconds or nanoseconds; its size shows which.

    Raises: ValueError: neither.

    >>> seconds_of("1970-01-01T00:01:00Z") == seconds_of("1970-01-01 00:01:00.0000000") == seconds_of(60) == 60
    True
    >>> {seconds_of(1_700_000_000 * units) for units in (1, 10**3, 10**6, 10**9)}
    {1700000000.0}
    """
    if isinstance(time, str):
        moment = datetime.fromisoformat(time)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not 0 <= time < float("inf"):
        raise ValueError(f"{time} is not a time")
    return next((time / units for first, units in _FINER_UNITS if time >= first), float(time))


def _from_the_first(requests: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    first_s = next((request.arrival_s for request in requests if request.arrival_s is not None), None)
    if not first_s:
        return list(requests)
    return [
        request if request.arrival_s is None else replace(request, arrival_s=request.arrival_s - first_s)
        for request in requests
    ]
