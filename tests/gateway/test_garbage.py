"""What a request took is freed when it ends: a full garbage collection, which is rare in a gateway, finds nothing.

Under overload most requests outlive the collections of young objects. Circles among their objects would then stay.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gateway.conftest import Serve, Served
from gateway.fakes import replicas, status

TIMES = 5


@contextmanager
def garbage() -> Iterator[list[str]]:
    """Yield a list that has, afterwards, the types of our objects that only a collection could free."""
    found: list[str] = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += [type(one).__qualname__ for one in gc.garbage if type(one).__module__.startswith("preble.")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def ask(gateway: Served, fields: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": "hello", **fields}
    async with gateway.http.post("/v1/completions", json=body) as reply:
        await reply.read()
        assert reply.status == 200


@pytest.mark.parametrize(
    "fields",
    [{}, {"stream": True}, {"prompt": ["a", "b"]}, {"prompt": ["a", "b"], "stream": True}],
    ids=["whole", "streamed", "list", "streamed list"],
)
async def test_a_request_leaves_no_circles_of_objects(serve: Serve, fields: dict[str, Any]) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        await ask(gateway, fields)
        await gateway.idle()
        with garbage() as left:
            for _ in range(TIMES):
                await ask(gateway, fields)
            await gateway.idle()
        assert left == []


async def test_a_request_that_moved_leaves_no_circles_of_objects(serve: Serve) -> None:
    async with replicas(2) as fakes, serve(fakes) as gateway:
        await ask(gateway, {})
        with garbage() as left:
            fakes[0].script.append(status(500))
            for _ in range(2):
                await ask(gateway, {})
            await gateway.idle()
            await asyncio.sleep(0)
        assert left == []
        assert sum(len(fake.requests) for fake in fakes) == 4
