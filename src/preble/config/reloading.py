"""Which settings a reload changes while the gateway serves."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import Struct

S = TypeVar("S", bound=Struct)

_CHANGEABLE = frozenset(
    {
        *("replicas", "groups", "models", "engine", "timeouts.body_s", "timeouts.total_s", "timeouts.drain_s"),
        "timeouts.no_replica_wait_s",
        *("limits", "queue", "health", "ejection", "retries", "parity", "discovery", "browsers"),
        *("auth.api_keys", "auth.admin_keys", "auth.keys_file", "auth.metrics_need_key", "auth.forward_authorization"),
        "peers.secret_file",
    }
)
"""Settings and sections."""


def is_changeable(key: str) -> bool:
    """Return whether a setting can be changed while serving.

    >>> is_changeable("limits.max_in_flight"), is_changeable("port")
    (True, False)
    """
    return key in _CHANGEABLE or key.rpartition(".")[0] in _CHANGEABLE


def in_force(running: S, read: S, section: str = "") -> S:
    """Return the configuration that holds after a reload: of what was `read`, the settings that a reload changes.

    >>> from preble.config import GatewayConfig
    >>> after = in_force(GatewayConfig(), GatewayConfig(tokenizer="other", engine="vllm"))
    >>> after.tokenizer, after.engine
    (None, 'vllm')
    """
    values: dict[str, Any] = {}
    for name in running.__struct_fields__:
        old, new = getattr(running, name), getattr(read, name)
        if is_changeable(section + name):
            values[name] = new
        elif isinstance(old, Struct):
            values[name] = in_force(old, new, f"{section}{name}.")
    return msgspec.structs.replace(running, **values)
