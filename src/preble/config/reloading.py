"""Which settings a reload changes while the gateway serves."""

from __future__ import annotations

_CHANGEABLE = frozenset(
    {
        *("replicas", "groups", "engine", "timeouts.body_s", "timeouts.total_s", "timeouts.drain_s"),
        *("limits", "queue", "health", "ejection", "retries", "parity", "discovery", "browsers"),
        *("auth.api_keys", "auth.admin_keys", "auth.keys_file", "auth.metrics_need_key", "auth.forward_authorization"),
    }
)
"""Settings and sections."""


def is_changeable(key: str) -> bool:
    """Return whether a setting can be changed while serving.

    >>> is_changeable("limits.max_in_flight"), is_changeable("port")
    (True, False)
    """
    return key in _CHANGEABLE or key.rpartition(".")[0] in _CHANGEABLE
