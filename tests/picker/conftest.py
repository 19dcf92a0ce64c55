from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from gateway.conftest import PROFILE
from gateway.fakes import FakeReplica
from picker.gateway_by_hand import Exchange, GatewayByHand, gateway_to
from preble.config import GatewayConfig, HealthConfig, ParityConfig, PickerConfig, ReplicaConfig, TimeoutsConfig
from preble.core.costs.model import CostModel
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.registry import make_policy
from preble.gateway.server import Gateway, serving
from preble.picker.server import Picker, picking
from support.waiting import eventually


class Picking:
    """A picker that runs, and a gateway that asks it."""

    def __init__(self, gateway: Gateway, picker: Picker, by_hand: GatewayByHand, stack: AsyncExitStack) -> None:
        self.gateway = gateway
        self.picker = picker
        self.by_hand = by_hand
        self.serving = gateway.serving
        self._stack = stack

    def exchange(self) -> Exchange:
        return self.by_hand.exchange()

    async def idle(self) -> None:
        """Wait until nothing is in flight any more, and have the scheduler check itself."""
        serving, bodies = self.serving, self.gateway.bodies
        await eventually(lambda: (serving.num_in_flight, serving.num_admitted, bodies.held) == (0, 0, 0))
        self.serving.scheduler.check()

    def in_flight(self) -> dict[str, int]:
        """By endpoint."""
        replicas = self.serving.scheduler.snapshot().replicas
        return {name.partition("//")[2]: state.num_requests for name, state in replicas.items()}

    def decision(self) -> Any:
        """The last one."""
        return next(iter(self.serving.recent.latest(1)))


Pick = Callable[..., AbstractAsyncContextManager[Picking]]


@pytest.fixture
def pick() -> Pick:
    """Start a picker for fake replicas and wait until they are live; at the end nothing may be in flight."""

    @asynccontextmanager
    async def start(
        fakes: list[FakeReplica], *, live: int | None = None, policy: str = "preble", **changes: Any
    ) -> AsyncIterator[Picking]:
        config = GatewayConfig(
            replicas=tuple(ReplicaConfig(fake.url) for fake in fakes),
            engine="openai",
            port=0,
            health=HealthConfig(check_interval_s=0.05, failures=2, retry_min_s=0.02, retry_max_s=0.05),
            timeouts=TimeoutsConfig(shutdown_s=1.0),
            parity=ParityConfig(enabled=False),
            picker=PickerConfig(port=0),
        )
        config = msgspec.structs.replace(config, **changes)
        scheduler = GlobalScheduler(make_policy(policy), CostModel(PROFILE))
        async with AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(serving(config, scheduler))
            picker = await stack.enter_async_context(picking(gateway))
            await eventually(lambda: len(gateway.serving.replicas) == (len(fakes) if live is None else live))
            by_hand = await stack.enter_async_context(gateway_to(picker.port))
            found = Picking(gateway, picker, by_hand, stack)
            yield found
            await found.idle()

    return start
