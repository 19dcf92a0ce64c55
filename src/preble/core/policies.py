"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from preble.core.baselines import LeastLoad, RoundRobin
from preble.core.e2 import E2
from preble.core.policy import Policy
from preble.errors import ConfigError

_POLICIES: MappingProxyType[str, Callable[[], Policy]] = MappingProxyType(
    {
        "e2": E2,
        "e2_rebalance": lambda: E2("e2_rebalance", mix_decode=False),
        "e2_per_request": lambda: E2("e2_per_request", rebalance=False, mix_decode=False),
        "round_robin": RoundRobin,
        "least_load": LeastLoad,
    }
)


def policy_names() -> tuple[str, ...]:
    """Every name that `make_policy` knows; the first is the default.

    `e2_per_request` and `e2_rebalance` are parts of `e2`, for the ablation: Algorithm 1 without its prefill/decode
    balance, and that with rebalancing and replication.

    >>> policy_names()
    ('e2', 'e2_rebalance', 'e2_per_request', 'round_robin', 'least_load')
    """
    return tuple(_POLICIES)


def make_policy(name: str) -> Policy:
    """A new policy. Raises: ConfigError: there is none of that name."""
    if name not in _POLICIES:
        raise ConfigError(f"unknown policy {name!r}; choose one of {', '.join(_POLICIES)}")
    return _POLICIES[name]()
