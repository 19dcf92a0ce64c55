from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from gateway.fakes import FakeReplica
from picker.gateway_by_hand import Exchange, GatewayByHand, gateway_to
from preble.config import PickerConfig, TimeoutsConfig
from preble.gateway.server import Gateway
from preble.picker.server import Picker, picking
from support.gateways import idle, quick_gateway
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
        await eventually(lambda: self.gateway.bodies.held == 0)
        await idle(self.gateway)

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
        settings = {"timeouts": TimeoutsConfig(shutdown_s=1.0), "picker": PickerConfig(port=0), **changes}
        async with AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(quick_gateway([fake.url for fake in fakes], policy, **settings))
            picker = await stack.enter_async_context(picking(gateway))
            await eventually(lambda: len(gateway.serving.replicas) == (len(fakes) if live is None else live))
            by_hand = await stack.enter_async_context(gateway_to(picker.port))
            found = Picking(gateway, picker, by_hand, stack)
            yield found
            await found.idle()

    return start
