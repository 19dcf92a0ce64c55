"""Everything that can be set of one gateway."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from preble.config.clients import (
    AuthConfig,
    BrowsersConfig,
    LimitsConfig,
    QueueConfig,
    TargetsConfig,
    TimeoutsConfig,
)
from preble.config.discovery import DiscoveryConfig, GroupConfig
from preble.config.knobs import ZeroOrMore
from preble.config.observing import MetricsConfig, RequestLogConfig, TracingConfig
from preble.config.peers import PeersConfig
from preble.config.picker import PickerConfig
from preble.config.replicas import EjectionConfig, HealthConfig, ParityConfig, ReplicaConfig, RetryConfig
from preble.config.scheduling import DecisionsConfig, SchedulerConfig, TokenizerConfig
from preble.config.selection import SelectionConfig
from preble.core.policies.registry import policy_names


class GatewayConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that can be set of one gateway."""

    replicas: tuple[ReplicaConfig, ...] = ()
    """The replicas: URLs, or tables with the keys below. Why: there is no sensible default."""
    groups: tuple[GroupConfig, ...] = ()
    """Replicas that are found through DNS or Kubernetes: tables with the keys below. In a file only. Why: most fleets
    are named."""
    models: dict[str, TargetsConfig] | None = None
    """Targets of requests for a model: a table for each, `[models."NAME"]`, with the keys below. In a file only. Why:
    without a target nothing is refused for it."""
    engine: str = "auto"
    """The replicas' program: `vllm`, `sglang`, `openai`, or your own adapter; `auto` asks each. Why: asking is cheap
    and reliable."""
    policy: str = policy_names()[0]
    """How replicas are chosen: {policies}; or `module:Class`, yours. Settings of `e2` follow its name:
    `e2?threshold=2&min_requests=4`. Why: first in our evaluation; `e2` is the paper's."""
    profile: str | None = None
    """Cost profile, a shipped name or a file. Why: an average GPU profile ranks replicas well enough."""
    tokenizer: str | None = None
    """The model's tokenizer: a folder, or a name on the hub. Why: without it the replicas' own `/tokenize` is asked."""
    host: str = "127.0.0.1"
    """Address to listen on. Why: closed to the network by default."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """Port to listen on; 0 lets the system choose. Why: what engines and clients use."""
    workers: Annotated[int, Meta(ge=0, le=256)] | None = None
    """[processes] Front-end processes that share the port, plus one scheduler process; 0: one process does all. By
    default one less than the cores that the gateway may use, and at most 4. Why: uses the cores; more than 4 help only
    with long prompts (docs/concepts/workers.md)."""
    scheduler_socket: str | None = None
    """Path of a Unix socket at which other processes of this user may place requests. Why: few need it; with `workers`,
    the gateway makes a private one."""
    seed: ZeroOrMore = 0
    """Seed of the scheduler's random tie-breaks. Why: fixed, so that runs can be repeated."""
    limits: LimitsConfig = LimitsConfig()
    queue: QueueConfig = QueueConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    health: HealthConfig = HealthConfig()
    ejection: EjectionConfig = EjectionConfig()
    retries: RetryConfig = RetryConfig()
    parity: ParityConfig = ParityConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    peers: PeersConfig = PeersConfig()
    tokenizing: TokenizerConfig = TokenizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    decisions: DecisionsConfig = DecisionsConfig()
    auth: AuthConfig = AuthConfig()
    browsers: BrowsersConfig = BrowsersConfig()
    metrics: MetricsConfig = MetricsConfig()
    tracing: TracingConfig = TracingConfig()
    log: RequestLogConfig = RequestLogConfig()
    picker: PickerConfig = PickerConfig()
    selection: SelectionConfig = SelectionConfig()
