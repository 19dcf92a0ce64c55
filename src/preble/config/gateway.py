"""Everything that can be set of one gateway."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from preble.config.clients import AuthConfig, BrowsersConfig, LimitsConfig, QueueConfig, TimeoutsConfig
from preble.config.discovery import DiscoveryConfig, GroupConfig
from preble.config.knobs import about
from preble.config.observing import MetricsConfig, RequestLogConfig, TracingConfig
from preble.config.peers import PeersConfig
from preble.config.picker import PickerConfig
from preble.config.replicas import EjectionConfig, HealthConfig, ParityConfig, ReplicaConfig, RetryConfig
from preble.config.scheduling import DecisionsConfig, SchedulerConfig, TokenizerConfig
from preble.config.selection import SelectionConfig
from preble.core.policies.registry import policy_names


class GatewayConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that can be set of one gateway."""

    replicas: Annotated[
        tuple[ReplicaConfig, ...],
        about("The replicas: URLs, or tables with the keys below.", why="there is no sensible default"),
    ] = ()
    groups: Annotated[
        tuple[GroupConfig, ...],
        about(
            "Replicas that are found through DNS or Kubernetes: tables with the keys below. In a file only.",
            why="most fleets are named",
        ),
    ] = ()
    engine: Annotated[
        str,
        about(
            "The replicas' program: `vllm`, `sglang`, `openai`, or your own adapter; `auto` asks each.",
            why="asking is cheap and reliable",
        ),
    ] = "auto"
    policy: Annotated[
        str,
        about(
            f"How replicas are chosen: {', '.join(f'`{name}`' for name in policy_names())}; or `module:Class`, yours. "
            "Settings of `e2` follow its name: `e2?threshold=2&min_requests=4`.",
            why="first in our evaluation; `e2` is the paper's",
        ),
    ] = policy_names()[0]
    profile: Annotated[
        str | None,
        about(
            "Cost profile, a shipped name or a file.",
            why="an average GPU profile ranks replicas well enough",
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        about(
            "The model's tokenizer: a folder, or a name on the hub.",
            why="without it the replicas' own `/tokenize` is asked",
        ),
    ] = None
    host: Annotated[str, about("Address to listen on.", why="closed to the network by default")] = "127.0.0.1"
    port: Annotated[
        int, about("Port to listen on; 0 lets the system choose.", why="what engines and clients use", ge=0, le=65535)
    ] = 8000
    workers: Annotated[
        Annotated[int, Meta(ge=0, le=256)] | None,
        about(
            "Front-end processes that share the port, plus one scheduler process; 0: one process does all. By default "
            "one less than the cores that the gateway may use, and at most 4.",
            why="uses the cores; more than 4 help only with long prompts (docs/concepts/workers.md)",
            unit="processes",
        ),
    ] = None
    scheduler_socket: Annotated[
        str | None,
        about(
            "Path of a Unix socket at which other processes of this user may place requests.",
            why="few need it; with `workers`, the gateway makes a private one",
        ),
    ] = None
    seed: Annotated[
        int,
        about("Seed of the scheduler's random tie-breaks.", why="fixed, so that runs can be repeated", ge=0),
    ] = 0
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
