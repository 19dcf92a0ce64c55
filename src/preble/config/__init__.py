"""Configuration of the gateway: the settings, in sections, and where their values come from.

`load`: how a file, the environment and flags become one `GatewayConfig`. `reference`: its page in the documentation.
"""

from preble.config.clients import AuthConfig, BrowsersConfig, LimitsConfig, QueueConfig, TimeoutsConfig
from preble.config.discovery import DiscoveryConfig, GroupConfig
from preble.config.gateway import GatewayConfig
from preble.config.knobs import Knob, knobs
from preble.config.observing import MetricsConfig, RequestLogConfig, TracingConfig
from preble.config.peers import PeersConfig
from preble.config.picker import PickerConfig
from preble.config.replicas import EjectionConfig, HealthConfig, ParityConfig, ReplicaConfig, RetryConfig
from preble.config.scheduling import DecisionsConfig, SchedulerConfig, TokenizerConfig
from preble.config.selection import SelectionConfig

__all__ = [
    "AuthConfig",
    "BrowsersConfig",
    "DecisionsConfig",
    "DiscoveryConfig",
    "EjectionConfig",
    "GatewayConfig",
    "GroupConfig",
    "HealthConfig",
    "Knob",
    "LimitsConfig",
    "MetricsConfig",
    "ParityConfig",
    "PeersConfig",
    "PickerConfig",
    "QueueConfig",
    "ReplicaConfig",
    "RequestLogConfig",
    "RetryConfig",
    "SchedulerConfig",
    "SelectionConfig",
    "TimeoutsConfig",
    "TokenizerConfig",
    "TracingConfig",
    "knobs",
]
