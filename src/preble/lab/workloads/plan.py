"""Workload plans: which requests a load generator sends, or a simulator plays, and when."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from preble.errors import ConfigError
from preble.lab.workloads.arrivals import ARRIVALS, make_arrivals
from preble.lab.workloads.mix import Part, mixed, part_number, parts_of
from preble.lab.workloads.model import Workload, WorkloadRequest
from preble.lab.workloads.popularity import in_proportion
from preble.lab.workloads.recorded import recording_file
from preble.lab.workloads.registry import make_workload, workload_names
from preble.lab.workloads.streams import Scenario, Stream, is_scenario, read_scenario, stream_workload


class WorkloadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides which requests are sent and when; kept in results, so that a run can be repeated.

    `source`: a workload's name, a trace file, a mix of them, each with an optional share of the requests and arrivals
    (`toolbench:2+video:1@azure.csv[200:2200]`), or a scenario, NAME.toml. `requests`: the total; None for all of a
    file. `rps`: mean requests a second, those that wait for parents included; None for the file's own arrival times, or
    for recorded `arrivals` as they are. `arrivals`, `cv`: see `make_arrivals`. `popularity`, `zipf`, `num_prefixes`:
    see `make_workload`. `streams`: the workload itself, instead of `source`, for `requests` / `rps` seconds after
    `warm_s`; see `stream_workload`.
    """

    source: str
    requests: int | None = None
    rps: float | None = None
    seed: int = 0
    arrivals: str = "poisson"
    cv: float = 1.0
    popularity: str | None = None
    zipf: float | None = None
    num_prefixes: int | None = None
    streams: tuple[Stream, ...] = ()
    warm_s: float = 0.0

    def make(self, *, needs_times: bool = True) -> Workload:
        """Return the workload with arrival times. The same plan gives the same workload.

        `needs_times`: False accepts a workload without times.

        Raises: ConfigError, TraceFormatError.
        """
        if (scenario := self.scenario()) is not None:
            if self.rps is None or self.requests is None:
                raise ConfigError(f"{self.source}: a scenario needs a rate (--rps) and a number of requests")
            lasting_s = self.requests / self.rps
            return stream_workload(scenario.stream, self.rps, lasting_s, scenario.warm_s, self.seed)
        parts = parts_of(self.source)
        if len(parts) == 1:
            return self._made(parts[0], self.requests, self.rps, self.seed, needs_times=needs_times)
        return mixed(self.source, [self._made(*of_part) for of_part in self._split(parts)])

    def scenario(self) -> Scenario | None:
        """Return the streams that the plan itself has, or those of the scenario file that it names; None for other
        sources.
        """
        if self.streams:
            return Scenario(stream=self.streams, warm_s=self.warm_s)
        return read_scenario(Path(self.source)) if is_scenario(self.source) else None

    @property
    def classes(self) -> tuple[str, ...]:
        """The kinds of requests that it mixes: the parts of a mix or the streams of a scenario; none of one source."""
        if (scenario := self.scenario()) is not None:
            return tuple(stream.name for stream in scenario.stream)
        parts = parts_of(self.source)
        return tuple(dict.fromkeys(part.source for part in parts)) if len(parts) > 1 else ()

    def class_of(self, request: WorkloadRequest) -> str:
        """Return which of `classes` a request of this workload is of; "" where there are none.

        >>> mix = WorkloadPlan(source="toolbench+video", requests=2, rps=1.0)
        >>> sorted(map(mix.class_of, mix.make().requests))
        ['toolbench', 'video']
        """
        if self.scenario() is not None:
            return request.group or ""
        parts = parts_of(self.source)
        return parts[part_number(request)].source if len(parts) > 1 else ""

    @property
    def tenants(self) -> dict[str, str]:
        """By class: the tenant that asks; only of a scenario whose streams are of several tenants."""
        scenario = self.scenario()
        found = {} if scenario is None else {stream.name: stream.tenant for stream in scenario.stream}
        return found if len(set(found.values())) > 1 else {}

    def files(self) -> tuple[Path, ...]:
        """Return the files that the workload and its arrivals come from, for results."""
        if self.streams:
            return ()
        if is_scenario(self.source):
            return (Path(self.source),)
        parts = parts_of(self.source)
        named = {part.source: None for part in parts if part.source not in workload_names()}
        named |= {part.arrivals or self.arrivals: None for part in parts}
        paths = (recording_file(text) for text in named if text not in ARRIVALS)
        return tuple(path for path in dict.fromkeys(paths) if path.is_file())

    def _split(self, parts: Sequence[Part]) -> Iterator[tuple[Part, int, float | None, int]]:
        """Yield each part with its number of requests, its rate and a seed of its own, so that parts differ."""
        if self.requests is None:
            raise ConfigError(f"the mix {self.source!r} has no end; give the number of requests")
        counts = in_proportion(self.requests, [part.share for part in parts])
        if 0 in counts:
            raise ConfigError(f"{self.requests} requests leave none for a part of {self.source!r}; ask for more")
        for i, (part, count) in enumerate(zip(parts, counts, strict=True)):
            rps = None if self.rps is None else self.rps * count / self.requests
            yield part, count, rps, random.Random(f"part/{self.seed}/{i}").getrandbits(32)

    def _made(
        self, part: Part, requests: int | None, rps: float | None, seed: int, *, needs_times: bool = True
    ) -> Workload:
        workload = make_workload(
            part.source, requests, seed, popularity=self.popularity, zipf=self.zipf, num_prefixes=self.num_prefixes
        )
        arrivals = part.arrivals or self.arrivals
        if rps is None and arrivals in ARRIVALS:
            if workload.has_arrivals or not needs_times:
                return workload
            raise ConfigError(f"workload {part.source!r} has no arrival times of its own; give a rate (--rps)")
        num_openers = len(workload.openers)
        openers_rps = None if rps is None else rps * num_openers / len(workload.requests)
        rng = random.Random(f"arrivals/{seed}")
        return workload.with_arrivals(make_arrivals(arrivals, num_openers, openers_rps, rng, cv=self.cv))
