from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from gateway.fakes import FakeReplica
from preble.gateway.requests.attempt import Attempt
from preble.gateway.requests.json_requests import JsonRequest
from preble.gateway.requests.states import NEXT, AttemptState, RequestState, State
from preble.gateway.server import Gateway
from support.gateways import idle, quick_gateway
from support.waiting import eventually

Steps = list[tuple[State, State]]


class CheckedState:
    """Stands for the attribute `state`, and notes each step. `first`: the state at first."""

    def __init__(self, first: State, steps: Steps) -> None:
        self._first = first
        self._steps = steps

    def __get__(self, one: Any, kind: type) -> State:
        return one.__dict__.get("state", self._first)

    def __set__(self, one: Any, after: State) -> None:
        self._steps.append((self.__get__(one, type(one)), after))
        one.__dict__["state"] = after


@pytest.fixture(autouse=True)
def steps_taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    """The steps that requests take, all of which must be drawn."""
    steps: Steps = []
    monkeypatch.setattr(JsonRequest, "state", CheckedState(RequestState.READING, steps))
    monkeypatch.setattr(Attempt, "state", CheckedState(AttemptState.SENT, steps))
    yield steps
    assert [f"{state} to {after}" for state, after in steps if after not in NEXT[state]] == []


class Served:
    """A running gateway and a client of it."""

    def __init__(self, gateway: Gateway, http: aiohttp.ClientSession, stack: AsyncExitStack) -> None:
        self.gateway = gateway
        self.http = http
        self.scheduler = gateway.serving.scheduler
        self._stack = stack

    async def stop(self) -> None:
        """Shut the gateway down. The client stays."""
        await self._stack.aclose()

    @property
    def num_live(self) -> int:
        return len(self.gateway.serving.replicas)

    async def metrics(self, key: str = "") -> str:
        async with self.http.get("/metrics", headers={"x-api-key": key}) as answer:
            return await answer.text()

    async def idle(self) -> None:
        """Wait until nothing is in flight any more, and have the scheduler check itself."""
        await idle(self.gateway)

    async def complete(self, **fields: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Status, body and lower-cased headers of a completion."""
        body = {"model": "tiny", "prompt": "hello", **fields}
        async with self.http.post("/v1/completions", json=body) as answer:
            return answer.status, await answer.json(), {k.lower(): v for k, v in answer.headers.items()}


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def serve() -> Serve:
    """Start a gateway before fake replicas and wait for `live` of them; at the end nothing may be in flight."""

    @asynccontextmanager
    async def start(
        fakes: list[FakeReplica], *, live: int | None = None, policy: str = "round_robin", **changes: Any
    ) -> AsyncIterator[Served]:
        async with AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(quick_gateway([fake.url for fake in fakes], policy, **changes))
            async with aiohttp.ClientSession(gateway.url) as http:
                served = Served(gateway, http, stack)
                await eventually(lambda: served.num_live == (len(fakes) if live is None else live))
                yield served
                await served.idle()

    return start
