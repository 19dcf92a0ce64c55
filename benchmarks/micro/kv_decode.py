"""What it costs one gateway to take in the KV events of a fleet, in CPU time.

    python benchmarks/micro/kv_decode.py --json benchmarks/results/kv_decode.json

The events are those of simulated replicas (A100, Mistral-7B) under tool use, 12.5 requests a second each, which is what
400 replicas have at 5,000 requests a second. Another process publishes them over ZMQ in vLLM's form, one message an
iteration. *Received*: subscribing, decoding, and following them (`KvEventStream`). *Indexed*: that, and the scheduler's
index. Each in bursts, as many messages as come together under load, and with one message every 2.5 ms, as four replicas
publish them. CPU time of this process, all its threads; the rounds of all run in turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import msgspec
import uvloop
import zmq

from preble.core.types import BlocksStored, KvEvent, ReplicaId, ReplicaSpec
from preble.decisions.settings import SchedulerSettings, make_scheduler
from preble.emulator.answers.placeholders import EmulatedMedia
from preble.emulator.kv.events import _PublishedBatch, wire_events
from preble.engines.kv_events.sockets import KvEventEndpoints
from preble.engines.kv_events.stream import KvEventStream
from preble.lab.sim import SimConfig, Simulation
from preble.lab.sim.gateways import make_cluster_scheduler
from preble.lab.workloads import WorkloadPlan
from preble.profiles import load_profile

PROFILE = "a100-mistral-7b"
REPLICAS, RATE_OF_ONE, REQUESTS, ROUNDS = 4, 12.5, 3000, 5
FLEET, FLEET_RATE = 400, 5000.0
BURST, BURST_PAUSE_S, PACE_S = 100, 0.005, 0.0025
BLOCK = 16
WATCHED = ReplicaId("r0")


class Cost(msgspec.Struct, frozen=True):
    """CPU time in microseconds, medians of the rounds. `paced`: a message every PACE_S, not in bursts. `cores`: of 400
    replicas at 5,000 requests a second."""

    what: str
    paced: bool
    us_a_message: float
    us_a_request: float
    cores: float


class Result(msgspec.Struct, frozen=True):
    """`messages`, `requests`, `stored_blocks`: of the replica whose events were taken in."""

    messages: int
    requests: int
    stored_blocks: int
    costs: list[Cost]


def recorded() -> tuple[list[list[KvEvent]], int]:
    """The events of one replica, one list an iteration, and how many requests it had."""
    config = SimConfig(profile=load_profile(PROFILE), replicas=REPLICAS, event_delay_s=0.0)
    plan = WorkloadPlan(source="tool_use", requests=REQUESTS, seed=1, rps=REPLICAS * RATE_OF_ONE)
    scheduler, batches = make_cluster_scheduler(config), list[list[KvEvent]]()

    class Recording(Simulation):
        def _report(self, replica, events, now):  # type: ignore[no-untyped-def]
            if replica.replica_id == WATCHED:
                batches.append(events)
            super()._report(replica, events, now)

    result = Recording(config, plan.make(), scheduler=scheduler).run()
    return batches, sum(record.replica == WATCHED for record in result.records)


def publish(messages: list[bytes], pipe: Connection) -> None:
    """In another process: send all of them each time that the pipe says how many at once; 0 is the end."""
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.setsockopt(zmq.SNDHWM, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        pipe.send(port)
        while (at_once := pipe.recv()) > 0:
            time.sleep(1.0)  # the subscription has to get here
            for number, message in enumerate(messages):
                socket.send_multipart([b"", number.to_bytes(8, "big"), message])
                if not (number + 1) % at_once:
                    time.sleep(BURST_PAUSE_S if at_once > 1 else PACE_S)


async def take(port: int, pipe: Connection, at_once: int, last: int, on_event: Callable[[KvEvent], object]) -> float:
    """CPU time until the last message has been taken."""
    stream = KvEventStream(WATCHED, KvEventEndpoints(f"tcp://127.0.0.1:{port}"), idle_check_s=1e6)
    pipe.send(at_once)
    began = time.process_time()

    def take(changes: Sequence[KvEvent]) -> None:
        for change in changes:
            on_event(change)
        if stream.position == last:
            stream.close()

    await stream.follow(take)
    return time.process_time() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()
    batches, requests = recorded()
    encode, media = msgspec.msgpack.Encoder().encode, EmulatedMedia(1)
    messages = [encode(_PublishedBatch(float(i), list(wire_events(events, media)))) for i, events in enumerate(batches)]
    stored = sum(len(e.block_hashes) for events in batches for e in events if isinstance(e, BlocksStored))
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=publish, args=(messages, there), daemon=True)
    process.start()
    port = here.recv()
    seconds: dict[tuple[str, bool], list[float]] = {}
    for _ in range(ROUNDS):
        for paced in (False, True):
            scheduler = make_scheduler(SchedulerSettings(), load_profile(PROFILE))
            scheduler.add_replica(ReplicaSpec(WATCHED, None, None, BLOCK, reports_events=True), 0.0)

            def index(event: KvEvent, scheduler=scheduler) -> None:  # type: ignore[no-untyped-def]
                (scheduler.on_stored if isinstance(event, BlocksStored) else scheduler.on_evicted)(event, 0.0)

            for what, on_event in (("received", lambda event: None), ("indexed", index)):
                taking = take(port, here, 1 if paced else BURST, len(messages) - 1, on_event)
                seconds.setdefault((what, paced), []).append(uvloop.run(taking))
    here.send(0)
    process.join()
    costs = []
    for (what, paced), of_it in seconds.items():
        us = 1e6 * median(of_it)
        costs.append(Cost(what, paced, us / len(messages), us / requests, us / requests * FLEET_RATE / 1e6))
    result = Result(len(messages), requests, stored, costs)
    text = msgspec.json.format(msgspec.json.encode(result), indent=1)
    print(text.decode())
    if args.json is not None:
        args.json.write_bytes(text + b"\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
