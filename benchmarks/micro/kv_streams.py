"""What it costs the gateway to follow the KV events of many replicas, and how long a large message holds up its loop.

    python benchmarks/micro/kv_streams.py --json benchmarks/results/kv_streams.json

One publisher stands for all replicas: what is measured is our side, in this process. *Idle*: nothing is published.
*Stall*: the longest time that a task of the event loop had to wait for its turn while a message of this size came in;
the median of several messages.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import msgspec
import structlog
import uvloop
import zmq
import zmq.asyncio

from preble.core.types import ReplicaId
from preble.engines.kv_events.sockets import KvEventEndpoints
from preble.engines.kv_events.stream import KvEventStream

STREAMS = (1, 64, 256)
SETTLE_S, WATCH_S = 5.0, 10.0
MESSAGE_TOKENS = (1_000, 10_000, 100_000, 1_000_000)
EVENT_TOKENS = 8_192
"""What an engine computes of one prompt in one iteration; a larger message has several such events."""

MESSAGES = 10
BLOCK = 16


class Publisher:
    """Numbers its messages as an engine does."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PUB)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoints = KvEventEndpoints(f"tcp://127.0.0.1:{port}")
        self._number = 0

    async def publish(self, payload: bytes) -> None:
        await self._socket.send_multipart([b"", self._number.to_bytes(8, "big"), payload])
        self._number += 1

    def close(self) -> None:
        self._context.destroy(linger=0)


@asynccontextmanager
async def following(publisher: Publisher, count: int) -> AsyncIterator[list[KvEventStream]]:
    """Start `count` streams that follow the publisher."""
    streams = [KvEventStream(ReplicaId(f"r{i}"), publisher.endpoints) for i in range(count)]
    tasks = [asyncio.create_task(stream.follow(lambda changes: None)) for stream in streams]
    try:
        yield streams
    finally:
        for stream in streams:
            stream.close()
        await asyncio.gather(*tasks)


async def idle(count: int) -> dict[str, float]:
    """Return what quiet streams cost: share of a core, threads, files."""
    publisher = Publisher()
    async with following(publisher, count):
        await asyncio.sleep(SETTLE_S)
        cpu, wall = time.process_time(), time.monotonic()
        await asyncio.sleep(WATCH_S)
        share = (time.process_time() - cpu) / (time.monotonic() - wall)
        threads, files = num_entries("/proc/self/task"), num_entries("/proc/self/fd")
    publisher.close()
    return {"streams": count, "core": round(share, 4), "threads": threads, "files": files}


def num_entries(folder: str) -> int:
    return len(list(Path(folder).iterdir()))


def message(tokens: int, first_block: int) -> bytes:
    """Return a message that stores this many tokens."""
    events = []
    for start in range(0, tokens, EVENT_TOKENS):
        ids = list(range(start, min(start + EVENT_TOKENS, tokens) // BLOCK * BLOCK))
        names = list(range(first_block + start, first_block + start + len(ids) // BLOCK))
        event = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": None, "token_ids": ids}
        events.append(event | {"block_size": BLOCK, "medium": "GPU"})
    return msgspec.msgpack.encode([0.0, events, 0])


async def stall(tokens: int) -> dict[str, float]:
    """The longest wait of a task for its turn while a message of this size comes in, the median of several."""
    publisher = Publisher()
    payloads = [message(tokens, (i + 1) * 10_000_000) for i in range(MESSAGES)]
    async with following(publisher, 1) as [stream]:
        while stream.counters.messages == 0:  # the subscription takes a moment
            await publisher.publish(msgspec.msgpack.encode([0.0, [], 0]))
            await asyncio.sleep(0.01)
        stalls = [await longest_wait(publisher, stream, payload) for payload in payloads]
    publisher.close()
    return {"tokens": tokens, "kib": len(payloads[0]) // 1024, "stall_ms": round(median(stalls) * 1000, 2)}


async def longest_wait(publisher: Publisher, stream: KvEventStream, payload: bytes) -> float:
    """Seconds that a task waited for its turn at most until this message was applied."""
    longest, taken = 0.0, stream.counters.messages + 1
    await publisher.publish(payload)
    while stream.counters.messages < taken:
        before = time.perf_counter()
        await asyncio.sleep(0)
        longest = max(longest, time.perf_counter() - before)
    return longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results = {
            "idle": [runner.run(idle(count)) for count in STREAMS],
            "stall": [runner.run(stall(tokens)) for tokens in MESSAGE_TOKENS],
        }
    for name, rows in results.items():
        print(name)
        for row in rows:
            print("  " + "  ".join(f"{key} {value:>8}" for key, value in row.items()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
