"""KV events of a replica that lies: whatever it says, the scheduler's books stay in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from preble.core.costs.model import CostModel
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.registry import make_policy
from preble.core.types import BlocksStored, KvEvent, ReplicaId, ReplicaSpec, Request, RequestId, pack_tokens
from preble.engines.kv_events.intake import EventIntake
from preble.engines.kv_events.sockets import MAX_MESSAGE_BYTES, KvEventEndpoints, KvMessage
from preble.engines.kv_events.stream import KvEventStream
from support.gateways import PROFILE
from support.waiting import eventually

LIAR, HONEST = ReplicaId("liar"), ReplicaId("honest")
HASHES = (*range(12), b"x", b"", -5, 2**63 - 1)


class Scene:
    """A scheduler with two replicas, requests that come and go, and the liar's messages."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.now = 0.0
        self.intake = EventIntake(LIAR, reset_keeps_host=True)
        self.running: list[RequestId] = []
        self.scheduler = GlobalScheduler(
            make_policy(rng.choice(["e2", "preble"])),
            CostModel(PROFILE),
            window_s=5.0,
            index_budget_bytes=rng.choice([None, 20_000, 3_000]),
        )
        block_size, capacity = rng.choice([1, 4, 16]), rng.choice([None, 200])
        for spec in (
            ReplicaSpec(LIAR, kv_capacity_tokens=capacity, block_size=block_size, reports_events=True),
            ReplicaSpec(HONEST, kv_capacity_tokens=200, block_size=16),
        ):
            self.scheduler.add_replica(spec, 0.0)

    async def step(self, number: int) -> None:
        """Something happens, and the books are looked through."""
        self.now += self.rng.random() / 2
        what = self.rng.choice(["lie", "lie", "lie", "place", "end"])
        if what == "lie":
            await self.lie(number)
        elif what == "place":
            request = Request(RequestId(f"r{number}"), pack_tokens(self.tokens(self.rng.randrange(1, 40))), 4, "")
            self.scheduler.place(request, self.now)
            self.running.append(request.request_id)
        elif self.running:
            request_id = self.running.pop(self.rng.randrange(len(self.running)))
            self.scheduler.on_finish(request_id, self.rng.choice([0, 3]), self.now, cached_tokens=0)
        self.scheduler.on_timer(self.now)
        self.scheduler.check()

    async def lie(self, number: int) -> None:
        event = self.rng.choice([self.stored, self.stored, self.removed, self.cleared])()
        payload = msgspec.msgpack.encode([0.0, [event]])
        for change in await self.intake.accept(KvMessage(number, payload)):
            if isinstance(change, BlocksStored):
                self.scheduler.on_stored(change, self.now)
            else:
                self.scheduler.on_evicted(change, self.now)

    def stored(self) -> dict[str, Any]:
        """Of changing block sizes, by names that are in use elsewhere, behind blocks that may be its own."""
        size, blocks = self.rng.choice([1, 2, 3, 4, 16]), self.rng.randrange(4)
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": self.rng.choices(HASHES, k=blocks),
            "parent_block_hash": self.rng.choice([None, None, *HASHES]),
            "token_ids": self.tokens(size * blocks),
            "block_size": size,
        }
        oddities: list[dict[str, Any]] = [
            {"token_ids": [-1] * blocks},
            {"block_size": self.rng.choice([0, -3, 2**40])},
            {"extra_keys": [self.rng.choice([None, ["salt"], [["image", 1]]]) for _ in range(blocks)]},
            {"lora_name": "adapter"},
        ]
        return event | self.rng.choice(oddities) if self.rng.random() < 0.2 else event

    def removed(self) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": self.rng.choices(HASHES, k=self.rng.randrange(4))}

    def cleared(self) -> dict[str, Any]:
        return {"type": "AllBlocksCleared"} if self.rng.random() < 0.1 else self.removed()

    def tokens(self, count: int) -> list[int]:
        return self.rng.choices(range(3), k=count)


@pytest.mark.parametrize("seed", range(8))
async def test_the_books_stay_in_order_whatever_a_replica_says(seed: int) -> None:
    scene = Scene(seed)
    for number in range(150):
        await scene.step(number)
    for request_id in scene.running:
        scene.scheduler.on_finish(request_id, 0, scene.now)
    scene.scheduler.check()
    assert scene.scheduler.snapshot().num_in_flight == 0
    assert scene.intake.counters.messages > 50


async def test_a_message_too_large_to_be_true_is_not_taken_and_those_after_it_are() -> None:
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    stream = KvEventStream(LIAR, KvEventEndpoints(f"tcp://127.0.0.1:{port}"))
    stored: set[Any] = set()

    def take(changes: Sequence[KvEvent]) -> None:
        for change in changes:
            if isinstance(change, BlocksStored):
                stored.update(change.block_hashes)

    async def told(number: int) -> bool:
        await publisher.send_multipart([b"", number.to_bytes(8, "big"), stored_block(number)])
        return number in stored

    reader = asyncio.create_task(stream.follow(take))
    try:
        await eventually(lambda: told(0), "what is small arrives")
        rubbish = msgspec.msgpack.encode([0.0, [bytes(MAX_MESSAGE_BYTES)]])
        await publisher.send_multipart([b"", (1).to_bytes(8, "big"), rubbish])
        await eventually(lambda: told(2), "what is small arrives again")
        assert stream.counters.malformed == 0
    finally:
        stream.close()
        await reader
        context.destroy(linger=0)


def stored_block(name: int) -> bytes:
    event = {"type": "BlockStored", "block_hashes": [name], "parent_block_hash": None}
    return msgspec.msgpack.encode([0.0, [event | {"token_ids": [name] * 16, "block_size": 16}]])
