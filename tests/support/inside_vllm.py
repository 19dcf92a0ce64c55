"""What Preble's order does in vLLM's own scheduler, without a model. Runs in vLLM's environment; prints a line of JSON.

    .engines/vllm/bin/python tests/support/inside_vllm.py

Each function is one scenario and returns what was seen; tests/engines/test_vllm_scheduler.py judges it.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "dev" / "engines"))

from bare_vllm import BareVllm
from vllm.v1.core.sched.scheduler import Scheduler

from preble.errors import ConfigError
from preble.integrations import settings
from preble.integrations.vllm_cache import AskedInTurn, ChainedBlocks
from preble.integrations.vllm_scheduler import PrebleAsyncScheduler, PrebleScheduler

Record = dict[str, Any]


def options(**values: object) -> dict[str, Any]:
    return {"preble": values}


class Prompts:
    """Token ids: a seed's own, or following a shared prefix."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def fresh(self, length: int) -> list[int]:
        return [self.chance.randrange(100, 4000) for _ in range(length)]


def run_dry(vllm: BareVllm) -> list[str]:
    """Step until nothing is left. Returns who was admitted, in order."""
    admitted = []
    while vllm.num_unfinished:
        admitted += vllm.step()
    return admitted


def admission_order(scheduler_cls: type, **preble: object) -> list[str]:
    """Who is admitted when, of cold, half-cached and hot requests that wait behind one another."""
    vllm = BareVllm(scheduler_cls, num_blocks=2000, max_running=1, additional_config=options(**preble))
    prompts = Prompts(1)
    warm, mild = prompts.fresh(1024), prompts.fresh(640)
    vllm.add("warm", warm)
    vllm.add("mild", mild)
    run_dry(vllm)
    vllm.add("blocker", prompts.fresh(64), 20)
    vllm.step()
    for name in ("cold1", "cold2", "mid1", "cold3", "hot1", "hot2", "mid2", "hot3"):
        prefix = {"hot": warm, "mid": mild, "col": []}[name[:3]]
        vllm.add(name, prefix + prompts.fresh(1064 - len(prefix)), 2)
    return run_dry(vllm)


def orders() -> Record:
    seen: Record = {order: admission_order(PrebleScheduler, order=order) for order in ("fcfs", "lpm", "groups")}
    return seen | {
        "stock": admission_order(Scheduler),
        "default": admission_order(PrebleScheduler),
        "asynchronous": admission_order(PrebleAsyncScheduler),
    }


def recorded_arrangements(vllm: BareVllm) -> list[Record]:
    """Filled with each arrangement from now on: what waited, what vLLM finds cached, and the order that was made."""
    records: list[Record] = []
    scheduler = vllm.scheduler
    arrange: Callable[[], None] = scheduler.arrange_waiting

    def recording() -> None:
        waiting = list(scheduler.waiting)
        arrange()
        records.append(
            {
                "waiting": [[r.request_id, r.num_tokens, vllm.cached_tokens(r)] for r in waiting],
                "in_front": [r.request_id for r in waiting if r.num_preemptions],
                "told": {r.request_id: scheduler._preble_cache.of(r) for r in waiting if not r.num_preemptions},
                "arranged": [r.request_id for r in scheduler.waiting],
            }
        )

    scheduler.arrange_waiting = recording
    return records


def churn() -> Record:
    """Arrivals, ends, aborts, evictions, preemptions and resets at random in a cache of 128 blocks."""
    vllm = BareVllm(PrebleScheduler, num_blocks=129, max_running=4, max_batch_tokens=256)
    records = recorded_arrangements(vllm)
    prompts = Prompts(2)
    chance = prompts.chance
    prefixes = [prompts.fresh(16 * chance.randrange(1, 40)) for _ in range(8)]
    alive: list[str] = []
    for step in range(1500):
        while chance.random() < 0.35 and len(alive) < 24:
            prefix = chance.choice(prefixes)
            name = f"r{step}.{len(alive)}"
            vllm.add(name, prefix[: chance.randrange(16, len(prefix) + 1)] + prompts.fresh(chance.randrange(1, 80)), 8)
            alive.append(name)
        if alive and chance.random() < 0.05:
            vllm.abort(chance.choice(alive))
        if chance.random() < 0.01:
            vllm.scheduler.reset_prefix_cache()
        vllm.step()
        alive = [name for name in alive if name in vllm.scheduler.requests]
    run_dry(vllm)
    return {"records": records, "kind": type(vllm.scheduler._preble_cache) is ChainedBlocks}


def pressure() -> Record:
    """120 requests in a cache that holds a few, one in nine aborted."""
    vllm = BareVllm(PrebleScheduler, num_blocks=65, max_running=8, max_batch_tokens=256)
    prompts = Prompts(3)
    prefixes = [prompts.fresh(128) for _ in range(4)]
    names = [f"r{i}" for i in range(120)]
    requests = [
        vllm.add(name, prefixes[i % 4] + prompts.fresh(prompts.chance.randrange(1, 200)), 100)
        for i, name in enumerate(names)
    ]
    steps = 0
    while vllm.num_unfinished:
        if steps % 20 == 0 and steps // 20 * 9 < len(names):
            vllm.abort(names[steps // 20 * 9])
        vllm.step()
        steps += 1
    vllm.scheduler.arrange_waiting()
    return {
        "preemptions": sum(request.num_preemptions for request in requests),
        "finished": sum(request.num_output_tokens == 100 for request in requests),
        "used_blocks": vllm.num_used_blocks,
        "left": len(vllm.scheduler.requests) + len(vllm.scheduler.waiting) + len(vllm.scheduler.running),
        "remembered": len(vllm.scheduler._preble_line) + len(vllm.scheduler._preble_cache),
    }


def starvation() -> Record:
    """Hits without end, and one miss behind `older` other ones: who is admitted until the miss is."""
    seen: Record = {"older": 3}
    for order in ("groups", "lpm"):
        vllm = BareVllm(PrebleScheduler, num_blocks=1000, max_running=1, additional_config=options(order=order))
        prompts = Prompts(4)
        prefix = prompts.fresh(512)
        vllm.add("warm", prefix)
        run_dry(vllm)
        vllm.add("blocker", prompts.fresh(64), 5)
        vllm.step()
        for i in range(3):
            vllm.add(f"older{i}", prefix + prompts.fresh(20))
        vllm.add("miss", prompts.fresh(400))
        admitted: list[str] = []
        while "miss" not in admitted and len(admitted) < 300:
            while len(vllm.scheduler.waiting) < 12:
                vllm.add(f"hit{vllm.scheduler.current_step}.{len(vllm.scheduler.waiting)}", prefix + prompts.fresh(20))
            admitted += vllm.step()
        seen[order] = {"admitted": admitted, "max_picks": vllm.scheduler._preble_line.max_picks(3)}
    return seen


def preempted_in_front() -> list[Record]:
    """Arrangements in which requests waited that had been preempted, and a better hit behind them."""
    vllm = BareVllm(PrebleScheduler, num_blocks=65, max_running=4)
    records = recorded_arrangements(vllm)
    prompts = Prompts(5)
    hot = prompts.fresh(160)
    vllm.add("hot", hot)
    run_dry(vllm)
    for i in range(4):
        vllm.add(f"long{i}", prompts.fresh(200), 200)
    vllm.step()
    for i in range(4):
        vllm.add(f"hit{i}", [*hot, 7], 100)
    run_dry(vllm)
    return [record for record in records if record["in_front"]]


def two_kinds_of_layers() -> Record:
    """A model with a sliding window: answers come in turn."""
    vllm = BareVllm(PrebleScheduler, num_blocks=2000, max_running=1, sliding_window=256)
    prompts = Prompts(6)
    warm = prompts.fresh(1024)
    vllm.add("warm", warm)
    run_dry(vllm)
    vllm.add("blocker", prompts.fresh(64), 60)
    vllm.step()
    for i in range(10):
        vllm.add(f"cold{i}", prompts.fresh(1064))
        vllm.add(f"hot{i}", warm + prompts.fresh(40))
    cache = vllm.scheduler._preble_cache
    vllm.scheduler.arrange_waiting()
    first = len(cache)
    for _ in range(40):
        vllm.scheduler.arrange_waiting()
    waiting = list(vllm.scheduler.waiting)
    return {
        "kind": type(cache) is AskedInTurn,
        "asked_at_first": first,
        "told": [cache.of(request) for request in waiting],
        "true": [vllm.cached_tokens(request) for request in waiting],
        "admitted": run_dry(vllm),
    }


def refusals() -> Record:
    """What is said to wrong options and versions."""

    def message(work: Callable[[], object]) -> str | None:
        try:
            work()
        except ConfigError as error:
            return str(error)
        return None

    def started(config: dict[str, Any], policy: str = "fcfs") -> object:
        return BareVllm(PrebleScheduler, num_blocks=9, max_running=1, additional_config=config, policy=policy)

    return {
        "order": message(lambda: started(options(order="fair"))),
        "table": message(lambda: started({"preble": "lpm"})),
        "policy": message(lambda: started({}, policy="priority")),
        "version": message(lambda: settings.require_version("vLLM", "0.33.0", "0.32", {})),
    }


if __name__ == "__main__":
    os.environ.pop("PREBLE_QUEUE_ORDER", None)
    scenarios = (orders, churn, pressure, starvation, preempted_in_front, two_kinds_of_layers, refusals)
    print(json.dumps({scenario.__name__: scenario() for scenario in scenarios}))
