"""What is simulated: the replicas, the policy, and what goes wrong when."""

from __future__ import annotations

import math
from dataclasses import replace
from enum import StrEnum

import msgspec

from preble.core.costs.model import CostProfile
from preble.core.costs.refit import CostFactors, scaled
from preble.core.replica.waiting_queue import QueueOrder
from preble.core.types import KV_LEASE_S, ReplicaId, Role
from preble.decisions.settings import SchedulerSettings
from preble.errors import ConfigError
from preble.plugins.policies import make_policy


class FailureKind(StrEnum):
    """What happens to a replica."""

    LOST = "lost"
    """It dies with everything in it."""
    ADDED = "added"
    """A replica with an empty cache joins."""
    RESTARTED = "restarted"
    """It dies and is back at once, its cache empty."""
    DRAINED = "drained"
    """It gets no new requests. What runs there goes on, and others can copy from it, until it is lost."""


class Failure(msgspec.Struct, frozen=True):
    """Something that happens to the replica of this name at `time_s`."""

    time_s: float
    kind: FailureKind
    replica: str

    @classmethod
    def parse(cls, text: str) -> Failure:
        """Read the form SECONDS:lost|added|restarted|drained:REPLICA. Raises: ConfigError.

        >>> Failure.parse("12.5:lost:r1")
        Failure(time_s=12.5, kind=<FailureKind.LOST: 'lost'>, replica='r1')
        """
        time_text, _, rest = text.partition(":")
        kind_text, _, replica = rest.partition(":")
        try:
            time_s, kind = float(time_text), FailureKind(kind_text)
        except ValueError:
            time_s, kind = math.nan, FailureKind.LOST
        if not (math.isfinite(time_s) and time_s >= 0 and replica):
            raise ConfigError(f"{text!r} is not SECONDS:lost|added|restarted|drained:REPLICA, such as 60:lost:r1")
        return cls(time_s, kind, replica)


class Cut(msgspec.Struct, frozen=True):
    """A time in which no message between gateways arrives."""

    from_s: float
    until_s: float

    @classmethod
    def parse(cls, text: str) -> Cut:
        """Read the form FROM:UNTIL, in seconds. Raises: ConfigError.

        >>> Cut.parse("10:20")
        Cut(from_s=10.0, until_s=20.0)
        """
        from_text, _, until_text = text.partition(":")
        try:
            cut = cls(float(from_text), float(until_text))
        except ValueError:
            cut = cls(math.nan, math.nan)
        if not 0 <= cut.from_s < cut.until_s < math.inf:
            raise ConfigError(f"{text!r} is not FROM:UNTIL in seconds, such as 10:20")
        return cut


class GatewayGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Several gateways in front of the cluster, each with a scheduler of its own. Each request goes to one at random.

    `delay_s`: how long a message takes to reach the others; None: they send each other nothing, and know of each
    other's requests only by KV events. `loss`: the share of messages that do not arrive. `cuts`: see `Cut`.
    """

    gateways: int = 2
    delay_s: float | None = 0.05
    loss: float = 0.0
    cuts: tuple[Cut, ...] = ()

    def __post_init__(self) -> None:
        _require(self.gateways >= 1, f"gateways must be at least 1, got {self.gateways}")
        _require((self.delay_s or 0.0) >= 0, f"the delay between gateways must not be negative, got {self.delay_s}")
        _require(0 <= self.loss < 1, f"the loss between gateways must be in 0 ... 1, got {self.loss}")


class SimLinks(msgspec.Struct, frozen=True, kw_only=True):
    """The links over which replicas copy KV from each other; each sends one copy at a time, and receives one.

    `bytes_per_s`: of each link in each direction. `latency_s`: of a copy, beside its time on the link. `groups`: names
    of the replicas that can copy from each other, for each group; none for all of them, those that join included.
    `splits`: one of a group may also compute a prompt for another one, which decodes the answer. `prefill`: so many
    replicas, the first ones, only compute prompts, and all others only decode; 0: none has a fixed role. `lease_s`: how
    long a source keeps a prompt of a split that nobody fetches; one that takes longer than half of it is given up.
    """

    bytes_per_s: float
    latency_s: float = 0.005
    groups: tuple[tuple[str, ...], ...] = ()
    splits: bool = False
    prefill: int = 0
    lease_s: float = KV_LEASE_S

    def __post_init__(self) -> None:
        _require(not (self.splits and self.prefill), "splits choose roles for each request; leave out one of both")
        _require(0 < self.bytes_per_s < math.inf, f"a link needs a positive rate, got {self.bytes_per_s}")
        _require(self.lease_s > 0, f"lease_s must be more than 0, got {self.lease_s}")
        _require(self.latency_s >= 0, f"a link's latency must not be negative, got {self.latency_s}")
        names = [name for group in self.groups for name in group]
        _require(len(names) == len(set(names)), f"a replica is in two transfer groups: {', '.join(names)}")

    def group_of(self, replica_id: str) -> str:
        """Return the name of a replica's group, "" for none."""
        if not self.groups:
            return "all"
        return next(("+".join(group) for group in self.groups if replica_id in group), "")


class SimConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated cluster. Same configuration and workload, same result.

    `replicas`: r0, r1, ... at the start. `profile`: its cost profile. `kv_tokens`: KV cache of one, None for the
    profile's. `block_size`, `max_batch_tokens`, `max_running`, `order`: of the local scheduler. `seed`: breaks the
    policy's ties. `window_s`: H. `dispatch_s`: from a placement to the
    request's arrival at the replica. `event_delay_s`: from the end of an iteration to its KV events' arrival at the
    scheduler, None for replicas that report nothing. `sample_s`: between two samples of the timeline, None for none.
    `failures`: what happens to replicas, in any order.

    Replicas that differ: `speeds`: name -> how fast it computes, 0.5 for half as fast; `kv_shares`: name -> its part of
    `kv_tokens`. Names may be those of replicas that join later. What the scheduler does not know: `profile_error`: the
    times of its cost profile over the true ones. `knowledge_delay_s`: how much later it learns of first tokens, ends
    and KV events than they happen. `group`: several gateways, None for one.

    `links`: over which replicas copy KV from each other; None: they cannot.
    """

    profile: CostProfile
    replicas: int = 4
    policy: str = "preble"
    kv_tokens: int | None = None
    block_size: int = 16
    max_batch_tokens: int = 2048
    max_running: int = 256
    order: QueueOrder = QueueOrder.FCFS
    seed: int = 0
    window_s: float = 180.0
    dispatch_s: float = 0.0
    event_delay_s: float | None = 0.001
    sample_s: float | None = None
    failures: tuple[Failure, ...] = ()
    speeds: dict[str, float] = {}
    kv_shares: dict[str, float] = {}
    profile_error: float = 1.0
    knowledge_delay_s: float = 0.0
    group: GatewayGroup | None = None
    links: SimLinks | None = None

    def __post_init__(self) -> None:
        make_policy(self.policy)  # refuses a policy that does not exist
        for name in ("block_size", "max_batch_tokens", "max_running"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("dispatch_s", "event_delay_s", "knowledge_delay_s"):
            _require((getattr(self, name) or 0.0) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        _require(self.replicas >= 0, f"replicas must not be negative, got {self.replicas}")
        _require(self.window_s > 0, f"window_s must be positive, got {self.window_s}")
        _require(self.profile_error > 0, f"profile_error must be positive, got {self.profile_error}")
        _require(self.sample_s is None or self.sample_s > 0, f"sample_s must be positive, got {self.sample_s}")
        _require(
            self.max_running <= self.max_batch_tokens,
            f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_running ({self.max_running})",
        )
        _require(
            self.num_blocks >= 2, f"kv_tokens must be at least two blocks of {self.block_size}, got {self.kv_tokens}"
        )
        self._check_failures()
        self._check_differences()

    @property
    def num_blocks(self) -> int:
        """KV blocks of one replica with all of its share."""
        return self._blocks(1.0)

    def role_of(self, replica_id: ReplicaId) -> Role:
        """Return the role of the replica of this name."""
        if self.links is None or not self.links.prefill:
            return Role.MIXED
        return Role.PREFILL if replica_id in self.initial_replicas[: self.links.prefill] else Role.DECODE

    def blocks_of(self, replica_id: str) -> int:
        """Return the KV blocks of the replica of this name."""
        return self._blocks(self.kv_shares.get(replica_id, 1.0))

    def _blocks(self, share: float) -> int:
        tokens = self.profile.kv_capacity_tokens if self.kv_tokens is None else self.kv_tokens
        return int(tokens * share) // self.block_size

    @property
    def initial_replicas(self) -> tuple[ReplicaId, ...]:
        return tuple(ReplicaId(f"r{i}") for i in range(self.replicas))

    @property
    def scheduler_settings(self) -> SchedulerSettings:
        """What it says of the global scheduler."""
        return SchedulerSettings(policy=self.policy, seed=self.seed, window_s=self.window_s)

    @property
    def true_profile(self) -> CostProfile:
        """The cost profile with the links."""
        if self.links is None:
            return self.profile
        return replace(self.profile, link_bytes_per_s=self.links.bytes_per_s, link_latency_s=self.links.latency_s)

    @property
    def told_profile(self) -> CostProfile:
        """The cost profile that the scheduler has."""
        if self.profile_error == 1.0:
            return self.true_profile
        return scaled(self.true_profile, CostFactors(prefill=self.profile_error, decode=self.profile_error))

    def _check_differences(self) -> None:
        """Raises: ConfigError: a share or a speed that cannot be, or of a replica that is never there."""
        known = {*self.initial_replicas, *(failure.replica for failure in self.failures)}
        if self.links is not None:
            unknown = {name for group in self.links.groups for name in group} - known
            _require(not unknown, f"a transfer group names {', '.join(sorted(unknown))}, which is never there")
            _require(
                0 <= self.links.prefill < max(self.replicas, 1),
                f"of {self.replicas} replicas at most {self.replicas - 1} can only compute prompts, got "
                f"{self.links.prefill}",
            )
            _require(
                self.profile.kv_bytes_per_token is not None,
                f"links need a profile with kv_bytes_per_token, and {self.profile.name!r} has none",
            )
        for name, shares in (("speeds", self.speeds), ("kv_shares", self.kv_shares)):
            unknown = shares.keys() - known
            _require(not unknown, f"{name} names {', '.join(sorted(unknown))}, which is never there")
            _require(all(0 < share < math.inf for share in shares.values()), f"{name} must be positive, got {shares}")
        _require(
            all(self.blocks_of(replica) >= 2 for replica in self.kv_shares),
            f"kv_shares leave less than two blocks of {self.block_size} tokens: {self.kv_shares}",
        )

    def _check_failures(self) -> None:
        """Raises: ConfigError: a replica is lost that is not there then, or added although it is."""
        there: set[str] = set(self.initial_replicas)
        for failure in sorted(self.failures, key=lambda failure: failure.time_s):
            is_there = failure.replica in there
            _require(
                is_there != (failure.kind is FailureKind.ADDED),
                f"at {failure.time_s:g} s replica {failure.replica!r} is {'' if is_there else 'not '}there, so it "
                f"cannot be {failure.kind}; at the start there are {', '.join(self.initial_replicas) or 'none'}",
            )
            if failure.kind is FailureKind.LOST:
                there.discard(failure.replica)
            else:
                there.add(failure.replica)


def _require(is_good: bool, message: str) -> None:
    if not is_good:
        raise ConfigError(f"simulation: {message}")
