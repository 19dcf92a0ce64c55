"""What is compared, and the single runs (cells) of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from itertools import chain, product
from math import ceil, inf
from pathlib import Path
from typing import NamedTuple

import msgspec

from preble import __version__
from preble.core.types import NO_TARGET, Target
from preble.errors import ConfigError
from preble.lab.metrics.capacity import CapacitySlo
from preble.lab.sim import SimConfig
from preble.lab.workloads import WorkloadPlan, WorkloadRequest, is_endless, usual_prefixes
from preble.plugins.policies import source_files
from preble.profiles import profile_fields

BASELINE = "least_load"
"""The policy that every other one is measured against: it spreads load and knows no cache."""


PROMISING = ", promising"
"""Ends the name of a policy that knows what requests ask for."""
LEAST_REQUESTS = 300
"""Of a run, however low its rate."""


class ComparePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Workloads x rates x policies x seeds on one simulated cluster.

    `workloads`: label -> plan; the plan's `rps` and `seed` are filled in for each run. `policies`: names. `cluster`:
    all of the simulation but `policy` and `seed`, which are filled in too. `seeds`: of the workload, its arrivals and
    the policy's ties, for every policy the same. `rates`: requests a second, or None for the arrival times that a trace
    has; none at all: each policy's capacity is searched, and the rates are `loads` times the capacity of the best
    policy. `search`: False searches nothing, and `loads` are shares of what no policy can sustain (`rate_bound`),
    which is much quicker and tells no capacity above the highest of these rates. `slo`: what capacity means, and
    `slos`: by label, where it means something else; a long document takes longer than a question, whatever the policy.
    `lasting_s`: how long requests arrive at each rate, which is how many there are, of a population of prefixes that
    does not depend on it; a run ends earlier where more of it would say nothing new. None, and for files: as many as
    the workloads say, always. `chunks`: the most tokens of an iteration, for each of which every policy is run; none:
    what `cluster` says. `targets`: what requests ask for, by their class (`WorkloadPlan.classes`), "" for all others;
    at each rate every policy then also runs knowing them, and goodput is measured. Such runs go to their end.

    Raises: ConfigError: something is missing, double or cannot be.
    """

    workloads: dict[str, WorkloadPlan]
    policies: tuple[str, ...]
    cluster: SimConfig
    seeds: tuple[int, ...] = (0, 1, 2)
    rates: tuple[float | None, ...] = ()
    loads: tuple[float, ...] = (0.5, 0.8, 0.95)
    search: bool = True
    slo: CapacitySlo = CapacitySlo(ttft_p99_s=2.0)
    slos: dict[str, CapacitySlo] = {}
    lasting_s: float | None = None
    chunks: tuple[int, ...] = ()
    targets: dict[str, Target] = {}

    def __post_init__(self) -> None:
        _check("workload", self.workloads.values())
        _check("policy", self.policies)
        _check("seed", self.seeds)
        _check("rate", self.rates or self.loads)
        numbers = [*(rate for rate in self.rates if rate is not None), *self.loads]
        if not all(0 < number < inf for number in numbers):
            raise ConfigError(f"compare: rates and loads must be positive numbers, got {self.rates} and {self.loads}")
        if self.lasting_s is not None and not 0 < self.lasting_s < inf:
            raise ConfigError(f"compare: a run must last a positive number of seconds, got {self.lasting_s}")
        if not self.rates and any(workload.arrivals == "burst" for workload in self.workloads.values()):
            raise ConfigError("compare: a burst has no rate, so that none can be found; give rates")
        if not self.slos.keys() <= self.workloads.keys():
            raise ConfigError(
                f"compare: an SLO is given for {', '.join(self.slos)}; the workloads are {', '.join(self.workloads)}"
            )
        if CapacitySlo() in (self.slo, *self.slos.values()):
            raise ConfigError("compare: the SLO bounds nothing, so there is no capacity; bound the TTFT or the E2E")
        if unknown := self.targets.keys() - {"", *chain.from_iterable(one.classes for one in self.workloads.values())}:
            raise ConfigError(f"compare: no workload has the class {', '.join(sorted(unknown))}, which has a target")
        for policy in self.policies:
            msgspec.structs.replace(self.cluster, policy=policy)  # refuses a policy that does not exist
        if self.chunks:
            _check("chunk", self.chunks)
            if min(self.chunks) < 1:
                raise ConfigError(f"compare: a chunk must have at least 1 token, got {min(self.chunks)}")

    @property
    def contenders(self) -> tuple[str, ...]:
        """What is ranked: the policies, each with every chunk where there are several."""
        return tuple(self._settings)

    @property
    def promising(self) -> tuple[str, ...]:
        """What is run beside the contenders where requests have targets: each of them, knowing these."""
        return tuple(contender + PROMISING for contender in self.contenders) if self.targets else ()

    @property
    def _settings(self) -> dict[str, tuple[str, int]]:
        """Contender -> its policy, and the most tokens of an iteration."""
        chunks = self.chunks or (self.cluster.max_batch_tokens,)
        pairs = product(self.policies, chunks)
        return {f"{policy}, chunk {chunk}" if self.chunks else policy: (policy, chunk) for policy, chunk in pairs}

    @property
    def is_search(self) -> bool:
        """Whether capacities are searched first."""
        return self.search and not self.rates

    def slo_of(self, workload: str) -> CapacitySlo:
        """Return what capacity means on the workload of that label."""
        return self.slos.get(workload, self.slo)

    def arms(self) -> Iterator[Arm]:
        """Yield workload by workload and seed by seed, for each policy one."""
        for workload in self.workloads:
            for seed in self.seeds:
                for policy in self.contenders:
                    yield Arm(workload, policy, seed)

    def cell(self, arm: Arm, rps: float | None) -> Cell:
        """Return the cell of a search for a capacity, in which no request has a target.

        As other processes read it: 30 and 30.0 are one rate, and have one key.
        """
        return self._cell(arm, rps, {})

    def grid_cell(self, arm: Arm, rps: float | None) -> Cell:
        """Return the cell at a rate at which all are compared."""
        return self._cell(arm, rps, self.targets)

    def _cell(self, arm: Arm, rps: float | None, targets: Mapping[str, Target]) -> Cell:
        workload = msgspec.structs.replace(self.workloads[arm.workload], rps=rps, seed=arm.seed)
        slo = None
        if self.lasting_s is not None and rps is not None and (workload.streams or is_endless(workload.source)):
            workload = msgspec.structs.replace(
                workload,
                requests=max(LEAST_REQUESTS, ceil(rps * self.lasting_s)),
                num_prefixes=workload.num_prefixes or usual_prefixes(workload.source),
            )
            slo = None if targets else self.slo_of(arm.workload)
        policy, chunk = self._settings[arm.policy.removesuffix(PROMISING)]
        running = min(self.cluster.max_running, chunk)
        config = msgspec.structs.replace(
            self.cluster, policy=policy, seed=arm.seed, max_batch_tokens=chunk, max_running=running
        )
        return _read_cell(
            arm, msgspec.json.encode(workload), msgspec.json.encode(config), slo, msgspec.json.encode(targets)
        )

    def cells(self, rates: Mapping[str, Sequence[float | None]]) -> Iterator[Cell]:
        """Yield the cells at each workload's rates; those that play the same requests follow each other."""
        for workload, of_it in rates.items():
            for seed, rps, policy in product(self.seeds, of_it, (*self.contenders, *self.promising)):
                yield self.grid_cell(Arm(workload, policy, seed), rps)


class Arm(NamedTuple):
    """What has a capacity: a policy on a workload, with a seed. `workload`: its label. `policy`: see `contenders`
    and `promising`."""

    workload: str
    policy: str
    seed: int


@dataclass(frozen=True)
class Cell:
    """One simulation: the arm's workload with a rate, on a cluster with the arm's policy.

    `slo`: the run may end as soon as it is clear whether it settles and keeps this; None for a run to the end.
    `targets`: what requests ask for, by class; the scheduler knows that only where `promises`.
    """

    arm: Arm
    workload: WorkloadPlan
    config: SimConfig
    slo: CapacitySlo | None = None
    targets: Mapping[str, Target] = field(default_factory=dict)

    @property
    def promises(self) -> bool:
        return self.arm.policy.endswith(PROMISING)

    def target_of(self, request: WorkloadRequest) -> Target:
        """Return what a request of the workload asks for."""
        return self.targets.get(self.workload.class_of(request), self.targets.get("", NO_TARGET))

    def tenant_of(self, request: WorkloadRequest) -> str:
        """Return who asks; one tenant asks for all where the workload has no others."""
        return self.workload.tenants.get(self.workload.class_of(request), "all")

    @property
    def key(self) -> str:
        """What a run is known by: the same version, workload and configuration (with the content of the workload's
        files and of the module that an own policy is in), same key."""
        profile = profile_fields(self.config.profile)
        config = msgspec.to_builtins(self.config) | {"profile": profile}
        if self.config.group is None:
            del config["group"]  # runs of one gateway were kept before there were several
        if self.config.links is None:
            del config["links"]  # and runs without links before there were any
        files = (*self.file_digests, *_digests(source_files(self.config.policy)))
        parts: tuple[object, ...] = (__version__, self.workload, files, config)
        if self.slo is not None:
            parts = (*parts, self.slo)
        if self.targets:
            parts = (*parts, self.targets, self.promises)
        return sha256(msgspec.json.encode(parts)).hexdigest()[:20]

    @property
    def warm_s(self) -> float:
        """Seconds in which the workload only fills the caches."""
        scenario = self.workload.scenario()
        return 0.0 if scenario is None else scenario.warm_s

    @property
    def first_event_s(self) -> float | None:
        """When the run first changes on purpose: a stream begins or ends, a replica fails or joins. None for never."""
        scenario = self.workload.scenario()
        times_s = [failure.time_s for failure in self.config.failures]
        for stream in () if scenario is None else scenario.stream:
            times_s += [self.warm_s + time_s for time_s in (stream.from_s, stream.until_s) if time_s]
        return min(times_s, default=None)

    def __reduce__(self) -> tuple[Callable[..., Cell], tuple[object, ...]]:
        """Make it go to other processes as JSON, as into its key: a compiled core's classes cannot be unpickled."""
        encode = msgspec.json.encode
        return _read_cell, (self.arm, encode(self.workload), encode(self.config), self.slo, encode(self.targets))

    @property
    def file_digests(self) -> tuple[str, ...]:
        """Of the files that the workload is read from."""
        return _digests(self.workload.files())


def _read_cell(arm: Arm, workload: bytes, config: bytes, slo: CapacitySlo | None, targets: bytes) -> Cell:
    decode = msgspec.json.decode
    asked = decode(targets, type=dict[str, Target])
    return Cell(arm, decode(workload, type=WorkloadPlan), decode(config, type=SimConfig), slo, asked)


def _digests(paths: Iterable[Path]) -> tuple[str, ...]:
    return tuple(_digest(str(path), path.stat().st_mtime_ns) for path in paths)


@lru_cache(maxsize=256)
def _digest(path: str, mtime_ns: int) -> str:
    """`mtime_ns`: so that a file which changes is read again."""
    return sha256(Path(path).read_bytes()).hexdigest()


def _check(what: str, values: Collection[object]) -> None:
    if not values:
        raise ConfigError(f"compare: give at least one {what}")
    if len(set(values)) < len(values):
        raise ConfigError(f"compare: a {what} is given twice in {', '.join(map(str, values))}")
