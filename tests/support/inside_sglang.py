"""What Preble's order does over SGLang's own radix trees, without a model. Runs in SGLang's environment; prints JSON.

    .engines/sglang/bin/python tests/support/inside_sglang.py

Each function is one scenario and returns what was seen; tests/engines/test_sglang.py judges it.
"""

from __future__ import annotations

import json
import random
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "dev" / "engines" / "sglang_cpu"))
import stand_ins  # noqa: F401 (makes SGLang importable)
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from preble.core.replica.waiting_queue import QueueOrder
from preble.errors import ConfigError
from preble.integrations.settings import OrderSettings
from preble.integrations.sglang_plugin import WaitingOrder

PAGE = 16
Record = dict[str, Any]


class NoMemory:
    """In place of the allocator of KV memory: whatever is given back to it is gone."""

    device = "cpu"

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@dataclass(eq=False)
class Request:
    """What the order uses of SGLang's own requests."""

    rid: str
    origin_input_ids: Any
    output_ids: Any = field(default_factory=lambda: array("q"))
    extra_key: str | None = None
    cache_salt: str | None = None
    is_retracted: bool = False


def tree(core: str) -> UnifiedRadixCache:
    return UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=NoMemory(),
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=core,
        )
    )


def store(cache: UnifiedRadixCache, tokens: list[int]) -> None:
    cache.insert(InsertParams(key=RadixKey(array("q", tokens)), value=torch.arange(len(tokens))))


def order_of(cache: UnifiedRadixCache, order: QueueOrder = QueueOrder.GROUPS) -> WaitingOrder:
    policy = SimpleNamespace(policy=SimpleNamespace(value="fcfs"), enable_priority_scheduling=False, tree_cache=cache)
    return WaitingOrder(policy, OrderSettings(order))


def matched(cache: UnifiedRadixCache, request: Request) -> int:
    """What SGLang itself would find for it, its last token left out."""
    key = RadixKey(request.origin_input_ids, limit=len(request.origin_input_ids) - 1)
    return int(cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len)


class Prompts:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def fresh(self, length: int) -> list[int]:
        return [self.chance.randrange(100, 4000) for _ in range(length)]


def churn(core: str) -> Record:
    """Up to eight requests wait, so that all are asked about; some are admitted, stored, evicted, retracted."""
    cache = tree(core)
    order = order_of(cache)
    prompts = Prompts(2)
    chance = prompts.chance
    prefixes = [prompts.fresh(PAGE * chance.randrange(1, 40)) for _ in range(8)]
    waiting: list[Request] = []
    records: list[Record] = []
    for step in range(400):
        while len(waiting) < 8 and chance.random() < 0.7:
            prefix = chance.choice(prefixes)
            tokens = prefix[: chance.randrange(1, len(prefix) + 1)] + prompts.fresh(chance.randrange(1, 80))
            waiting.append(Request(f"r{step}.{len(waiting)}", array("q", tokens)))
        shown = list(waiting)
        order.arrange(waiting)
        records.append(
            {
                "waiting": [[r.rid, len(r.origin_input_ids), matched(cache, r)] for r in shown],
                "in_front": [r.rid for r in shown if r.is_retracted],
                "arranged": [r.rid for r in waiting],
            }
        )
        for request in waiting[: chance.randrange(0, 4)]:
            waiting.remove(request)
            store(cache, request.origin_input_ids.tolist())
            if chance.random() < 0.05:
                waiting.append(Request(request.rid, request.origin_input_ids, is_retracted=True))
        if chance.random() < 0.2:
            cache.evict(EvictParams(num_tokens=PAGE * chance.randrange(1, 60)))
    return {"records": records, "core": type(cache.tree_core).__name__}


def starvation(order: QueueOrder) -> Record:
    """Hits without end, and one miss behind three of them: who is served until the miss is."""
    cache = tree("rust")
    arranged = order_of(cache, order)
    prompts = Prompts(4)
    prefix = prompts.fresh(512)
    store(cache, prefix)
    waiting = [Request(f"older{i}", array("q", prefix + prompts.fresh(20))) for i in range(3)]
    waiting.append(Request("miss", array("q", prompts.fresh(400))))
    served: list[str] = []
    while "miss" not in served and len(served) < 300:
        while len(waiting) < 12:
            waiting.append(Request(f"hit{len(served)}.{len(waiting)}", array("q", prefix + prompts.fresh(20))))
        arranged.arrange(waiting)
        served.append(waiting.pop(0).rid)
    return {"served": served, "max_picks": arranged.line.max_picks(3)}


def looking_is_no_use() -> list[int]:
    """Cached tokens of two prompts after an eviction; the first, stored before, was looked at again and again."""
    cache = tree("rust")
    prompts = Prompts(5)
    first, second = prompts.fresh(160), prompts.fresh(160)
    store(cache, first)
    store(cache, second)
    order = order_of(cache)
    requests = [Request("again", array("q", [*first, 1]))]
    for _ in range(20):
        order.arrange(requests)
    cache.evict(EvictParams(num_tokens=160))
    return [matched(cache, Request("", array("q", [*tokens, 1]))) for tokens in (first, second)]


def refusals() -> list[str]:
    """What is said where SGLang orders by itself."""
    messages = []
    for policy, by_priority in (("lpm", False), ("fcfs", True)):
        policy_now = SimpleNamespace(
            policy=SimpleNamespace(value=policy), enable_priority_scheduling=by_priority, tree_cache=None
        )
        try:
            WaitingOrder(policy_now, OrderSettings())
        except ConfigError as error:
            messages.append(str(error))
    return messages


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "churn": {core: churn(core) for core in ("rust", "python")},
                "groups": starvation(QueueOrder.GROUPS),
                "lpm": starvation(QueueOrder.LPM),
                "looking_is_no_use": looking_is_no_use(),
                "refusals": refusals(),
            }
        )
    )
