"""Configuration of the gateway: what can be set, in sections, and how it is told.

`load`: how a file, the environment and flags become one `GatewayConfig`. `reference`: its page in the documentation.
"""

from preble.gateway.config.clients import AuthConfig, LimitsConfig, TimeoutsConfig
from preble.gateway.config.gateway import GatewayConfig
from preble.gateway.config.knobs import Knob, knobs
from preble.gateway.config.replicas import HealthConfig, ParityConfig, ReplicaConfig
from preble.gateway.config.scheduling import DecisionsConfig, RebalanceConfig, SchedulerConfig, TokenizerConfig

__all__ = [
    "AuthConfig",
    "DecisionsConfig",
    "GatewayConfig",
    "HealthConfig",
    "Knob",
    "LimitsConfig",
    "ParityConfig",
    "RebalanceConfig",
    "ReplicaConfig",
    "SchedulerConfig",
    "TimeoutsConfig",
    "TokenizerConfig",
    "knobs",
]
