"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from preble.core.baselines import LeastLoad, RoundRobin
from preble.core.e2 import E2
from preble.core.policy import Policy
from preble.errors import ConfigError

_POLICIES: MappingProxyType[str, Callable[[], Policy]] = MappingProxyType(
    {policy.name: policy for policy in (E2, RoundRobin, LeastLoad)}
)


def policy_names() -> tuple[str, ...]:
    """Every name that `make_policy` knows; the first is the default.

    >>> policy_names()
    ('e2', 'round_robin', 'least_load')
    """
    return tuple(_POLICIES)


def make_policy(name: str) -> Policy:
    """A new policy. Raises: ConfigError: there is none of that name."""
    if name not in _POLICIES:
        raise ConfigError(f"unknown policy {name!r}; choose one of {', '.join(_POLICIES)}")
    return _POLICIES[name]()
