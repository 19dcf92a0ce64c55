"""Configuration of the gateway: the settings, in sections, and where their values come from.

`load`: how a file, the environment and flags become one `GatewayConfig`.
"""

from preble.config.clients import AuthConfig as AuthConfig
from preble.config.clients import BrowsersConfig as BrowsersConfig
from preble.config.clients import LimitsConfig as LimitsConfig
from preble.config.clients import QueueConfig as QueueConfig
from preble.config.clients import TargetsConfig as TargetsConfig
from preble.config.clients import TimeoutsConfig as TimeoutsConfig
from preble.config.discovery import DiscoveryConfig as DiscoveryConfig
from preble.config.discovery import GroupConfig as GroupConfig
from preble.config.gateway import GatewayConfig as GatewayConfig
from preble.config.knobs import Knob as Knob
from preble.config.knobs import knobs as knobs
from preble.config.observing import MetricsConfig as MetricsConfig
from preble.config.observing import RequestLogConfig as RequestLogConfig
from preble.config.observing import TracingConfig as TracingConfig
from preble.config.peers import PeersConfig as PeersConfig
from preble.config.picker import PickerConfig as PickerConfig
from preble.config.replicas import EjectionConfig as EjectionConfig
from preble.config.replicas import HealthConfig as HealthConfig
from preble.config.replicas import ParityConfig as ParityConfig
from preble.config.replicas import ReplicaConfig as ReplicaConfig
from preble.config.replicas import RetryConfig as RetryConfig
from preble.config.scheduling import DecisionsConfig as DecisionsConfig
from preble.config.scheduling import SchedulerConfig as SchedulerConfig
from preble.config.scheduling import TokenizerConfig as TokenizerConfig
from preble.config.selection import SelectionConfig as SelectionConfig
