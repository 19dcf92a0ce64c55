"""Each real engine in turn, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from preble.engines import Engine
from preble.engines.kv_events.sockets import KvEventEndpoints
from support.questions import Replica, SglangReplica, VllmReplica, asked, client_of
from support.replicas import RunningReplicas


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of the replicas that run: `replicas.replicas[index]`."""

    replicas: RunningReplicas
    index: int
    kind: type[Replica]

    @property
    def url(self) -> str:
        return self.replicas.urls[self.index]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("vllm_pair", id="vllm", marks=pytest.mark.vllm),
        pytest.param("sglang", id="sglang", marks=pytest.mark.sglang),
    ],
)
def one(request: pytest.FixtureRequest) -> OneOf:
    """A replica that orders its waiting requests as Preble does; mark tests with a timeout of TEST_TIMEOUT_S."""
    replicas: RunningReplicas = request.getfixturevalue(request.param)
    if request.param == "sglang":
        return OneOf(replicas, 0, SglangReplica)
    return OneOf(replicas, 1, VllmReplica)


@pytest.fixture
async def replica(one: OneOf) -> AsyncIterator[Replica]:
    """It, with nothing in it."""
    async with asked(one.kind, one.url) as replica:
        yield replica


@pytest.fixture
async def engine(replica: Replica) -> AsyncIterator[Engine]:
    """Our client of it."""
    async with client_of(replica) as engine:
        yield engine


@pytest.fixture
def endpoints(engine: Engine) -> KvEventEndpoints:
    """Of its events, as the engine itself reports them."""
    return endpoints_of(engine)


def endpoints_of(engine: Engine) -> KvEventEndpoints:
    endpoints = getattr(engine, "kv_event_endpoints", None)
    assert isinstance(endpoints, KvEventEndpoints)
    return endpoints
