"""What can be set of a router: the settings of a gateway that are about placing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec
import ray
from ray.serve.config import RequestRouterConfig

from preble.config import EjectionConfig, GatewayConfig, ParityConfig, PeersConfig
from preble.errors import ConfigError
from preble.integrations.settings import require_version

KNOWN_VERSION = "2.60"
ROUTER = "preble.integrations.ray.router.PrebleRouter"
SETTINGS = ("policy", "profile", "tokenizer", "seed", "scheduler", "tokenizing", "decisions", "limits")
STATS_S = 1.0
"""How often Ray passes on where the replicas' KV events are. Its own default of 10 s leaves new replicas without."""


def request_router_config(**settings: Any) -> RequestRouterConfig:
    """Return the `request_router_config` of a deployment that `PrebleRouter` serves.

    `settings`: as in a gateway's configuration; those that `SETTINGS` names.
    Raises: ConfigError: one is wrong, or this Ray is another version than Preble knows.
    """
    config_of(settings)
    return RequestRouterConfig(
        request_router_class=ROUTER, request_router_kwargs=settings, request_routing_stats_period_s=STATS_S
    )


def config_of(settings: Mapping[str, Any]) -> GatewayConfig:
    """Return a router's settings as a gateway's. Raises: ConfigError."""
    require_version("Ray", ray.__version__, KNOWN_VERSION, os.environ)
    if unknown := sorted(settings.keys() - set(SETTINGS)):
        raise ConfigError(f"PrebleRouter has no setting {unknown[0]!r}; it has: {', '.join(SETTINGS)}")
    try:
        config = msgspec.convert(dict(settings), GatewayConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings of PrebleRouter: {error}") from error
    return msgspec.structs.replace(
        config,
        parity=ParityConfig(enabled=False),  # replicas speak no HTTP
        ejection=EjectionConfig(enabled=False),  # Ray checks its replicas itself, and does not say what failed
        peers=PeersConfig(name=f"{os.uname().nodename}:{os.getpid()}"),
    )
