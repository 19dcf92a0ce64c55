"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from preble.core.policies.baselines import LeastLoad, PowerOfTwo, RandomChoice, RoundRobin
from preble.core.policies.e2.policy import E2
from preble.core.policies.e2.rebalance import settings_of
from preble.core.policies.policy import Policy
from preble.core.policies.preble import Preble
from preble.core.policies.routers.aibrix import AibrixPreble
from preble.core.policies.routers.dynamo import DynamoKv
from preble.core.policies.routers.kubeai import Chwbl
from preble.core.policies.routers.llmd import LlmdBlend, StickyUntilSaturated
from preble.core.policies.routers.lmetric import LMetric
from preble.core.policies.routers.ray import RayPrefix
from preble.core.policies.routers.sglang import SglangCacheAware, SlimRouter, SmgCacheAware
from preble.errors import ConfigError

_POLICIES: MappingProxyType[str, Callable[[], Policy]] = MappingProxyType(
    {
        "preble": Preble,
        "e2": E2,
        "e2_rebalance": lambda: E2("e2_rebalance", mix_decode=False),
        "e2_per_request": lambda: E2("e2_per_request", rebalance=False, mix_decode=False),
        "round_robin": RoundRobin,
        "least_load": LeastLoad,
        "random": RandomChoice,
        "power_of_two": PowerOfTwo,
        "sglang_cache_aware": SglangCacheAware,
        "smg_cache_aware": SmgCacheAware,
        "slim_router": SlimRouter,
        "dynamo_kv": DynamoKv,
        "sticky_until_saturated": StickyUntilSaturated,
        "llmd_blend": LlmdBlend,
        "chwbl": Chwbl,
        "ray_prefix": RayPrefix,
        "lmetric": LMetric,
        "aibrix_preble": AibrixPreble,
    }
)


def policy_names() -> tuple[str, ...]:
    """Return every name that `make_policy` knows; the first is the default.

    `e2_per_request` and `e2_rebalance` are parts of `e2`, for the ablation: Algorithm 1 without the balance of prefill
    and decode, and the same with rebalancing and replication. All of them: docs/reference/policies.md.

    >>> policy_names()[:6]
    ('preble', 'e2', 'e2_rebalance', 'e2_per_request', 'round_robin', 'least_load')
    """
    return tuple(_POLICIES)


def reads_token_ids(name: str) -> bool:
    """Return whether the policy's choices depend on the token ids, not only on which prompts share tokens."""
    return name == Chwbl.name


def make_policy(name: str) -> Policy:
    """Return a new policy. `name`: with its settings, if it has any: `e2?threshold=2&min_requests=4`.

    Raises: ConfigError: there is none of that name, or it has no such setting.
    """
    plain, _, settings = name.partition("?")
    if plain not in _POLICIES:
        raise ConfigError(f"unknown policy {plain!r}; choose one of {', '.join(_POLICIES)}")
    policy = _POLICIES[plain]()
    if settings:
        if not isinstance(policy, E2):
            raise ConfigError(f"policy {plain!r} has no settings, so remove {settings!r}")
        policy.use(name, settings_of(settings))
    return policy
