"""Gateways in front of replicas, and those that notice everything soon in front of fake ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from preble.config import GatewayConfig, HealthConfig, ParityConfig, ReplicaConfig, TimeoutsConfig
from preble.core.costs.model import CostModel, CostProfile
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.registry import make_policy
from preble.gateway.server import Gateway, serving
from support.waiting import eventually

PROFILE = CostProfile("test", "made up", ((0, 0.0), (1000, 0.1)), 0.0, 0.02, 0.0, 0.0, 100_000)
QUICK = HealthConfig(check_interval_s=0.05, failures=2, retry_min_s=0.02, retry_max_s=0.05)


@asynccontextmanager
async def gateway_before(
    replicas: Sequence[ReplicaConfig],
    scheduler: GlobalScheduler | None = None,
    /,
    *,
    joined: int | None = None,
    **settings: Any,
) -> AsyncIterator[Gateway]:
    """A running gateway, once these replicas have joined: `joined` of them, where each is several ranks.

    It checks no parity, unless `settings` say so, whose own `scheduler` is the section of that name.
    """
    settings = {"parity": ParityConfig(enabled=False), **settings}
    async with serving(GatewayConfig(replicas=tuple(replicas), port=0, **settings), scheduler) as gateway:
        await eventually(lambda: len(gateway.serving.replicas) == (joined or len(replicas)), "they have joined")
        yield gateway


async def idle(gateway: Gateway) -> None:
    """Wait until nothing is in flight any more, and have the scheduler check itself."""
    await eventually(lambda: gateway.serving.num_in_flight == 0 and gateway.serving.num_admitted == 0)
    gateway.serving.scheduler.check()


def quick_config(urls: Sequence[str], **changes: Any) -> GatewayConfig:
    """The replicas at these addresses, watched closely. `changes`: other settings.

    No request waits for a replica: most tests are of what happens at once.
    """
    settings: dict[str, Any] = {
        "replicas": tuple(map(ReplicaConfig, urls)),
        "engine": "openai",
        "port": 0,
        "health": QUICK,
        "timeouts": TimeoutsConfig(shutdown_s=10.0, no_replica_wait_s=0.0),
        "parity": ParityConfig(enabled=False),
    }
    return GatewayConfig(**(settings | changes))


@asynccontextmanager
async def quick_gateway(urls: Sequence[str], policy: str, **changes: Any) -> AsyncIterator[Gateway]:
    """A running gateway with that configuration and policy."""
    async with serving(quick_config(urls, **changes), GlobalScheduler(make_policy(policy), CostModel(PROFILE))) as one:
        yield one
