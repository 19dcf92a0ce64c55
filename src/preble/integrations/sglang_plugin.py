"""Preble's order of the waiting requests in SGLang, through its plug-in point `sglang.srt.plugins`.

SGLang finds the plug-in when Preble is installed in its environment. It does nothing until it is switched on:

    PREBLE_QUEUE_ORDER=groups python -m sglang.launch_server --model-path MODEL

with "groups" or "lpm"; PREBLE_QUEUE_GROUPS is the number of groups. See docs/howto/sglang.md.

The plug-in sorts the list of waiting requests in place before each attempt at a prefill; SGLang then builds the batch
from it. Asking the radix tree how much of a prompt is cached does not count as a use of the cache.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from preble.core.replica.waiting_queue import QueueOrder
from preble.errors import ConfigError
from preble.integrations.hit_ratio_sampler import HitRatioSampler
from preble.integrations.settings import ORDER_VARIABLE, OrderSettings, require_version
from preble.integrations.waiting_line import WaitingLine

KNOWN_VERSION = "0.5.23"

FAST_LOOKUPS, SLOW_LOOKUPS = (8, 8), (2, 1)
"""Lookups before each attempt at a prefill, of new requests and of others in turn. One of 4,000 tokens takes 8 µs in
SGLang's Rust tree (the default) and 100 µs in the others."""

_POLICY = "sglang.srt.managers.schedule_policy.SchedulePolicy"
_ATTRIBUTE = "_preble_order"

logger = logging.getLogger("sglang.preble")


def register() -> None:
    """Install the order; SGLang calls this in each of its processes. Exits with the reason if it cannot."""
    if ORDER_VARIABLE not in os.environ:
        return
    try:
        install(OrderSettings.read(os.environ))
    except ConfigError as error:
        # SGLang would log any exception and serve without the requested order.
        raise SystemExit(f"preble: {error}") from error


def install(settings: OrderSettings) -> None:
    """Hook into the waiting list. Raises: ConfigError: an unknown version of SGLang."""
    if settings.order is QueueOrder.FCFS:
        return
    import sglang  # type: ignore[import-not-found]
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found]

    require_version("SGLang", sglang.__version__, KNOWN_VERSION, os.environ)

    def attach(result: None, policy: Any, *_: Any, **__: Any) -> None:
        setattr(policy, _ATTRIBUTE, WaitingOrder(policy, settings))

    HookRegistry.register(f"{_POLICY}.__init__", attach, HookType.AFTER)
    HookRegistry.register(f"{_POLICY}.calc_priority", calc_priority, HookType.AROUND)


def calc_priority(original: Callable[..., None], policy: Any, waiting: list[Any], *args: Any, **kwargs: Any) -> None:
    """Do SGLang's bookkeeping, then apply our order; replaces SGLang's own method."""
    original(policy, waiting, *args, **kwargs)
    order: WaitingOrder = getattr(policy, _ATTRIBUTE)
    order.arrange(waiting)


class WaitingOrder:
    """The order of one scheduler's waiting list."""

    def __init__(self, policy: Any, settings: OrderSettings) -> None:
        """`policy`: SGLang's SchedulePolicy. Raises: ConfigError: it orders requests itself."""
        if policy.policy.value != "fcfs" or policy.enable_priority_scheduling:
            raise ConfigError(
                f"Preble orders the waiting requests; start SGLang with --schedule-policy fcfs and without "
                f"--enable-priority-scheduling, or unset {ORDER_VARIABLE}"
            )
        look, (new, turns) = _lookup(policy.tree_cache)
        self.cache = HitRatioSampler[Any](look, new_per_batch=new, turns_per_batch=turns)
        self.line = WaitingLine[Any](
            settings, num_tokens=_num_tokens, cached_tokens=self._cached_tokens, on_gone=self.cache.forget
        )
        logger.info("Preble orders waiting requests: %s, %d groups", settings.order, settings.num_groups)

    def arrange(self, waiting: list[Any]) -> None:
        """Sort the list. Requests that SGLang has retracted come first, in its order. O(waiting)."""
        retracted = [request for request in waiting if request.is_retracted]
        others = {request.rid: request for request in waiting if not request.is_retracted}
        self.cache.new_batch()
        waiting[:] = retracted + self.line.arrange(others)

    def _cached_tokens(self, request: Any) -> int:
        return self.cache.of(request.rid, request)


def _num_tokens(request: Any) -> int:
    return max(len(request.origin_input_ids), 1)


def _lookup(tree: Any) -> tuple[Callable[[Any], int], tuple[int, int]]:
    """Return how to ask this radix tree for the cached tokens of a request, and how often before each batch."""
    core = getattr(tree, "tree_core", None)
    if core is None:
        return _match_as_sglang_does(tree), SLOW_LOOKUPS
    from sglang.srt.mem_cache.radix_cache import RadixKey  # type: ignore[import-not-found]

    def look(request: Any) -> int:
        # The last token is always computed.
        limit = len(request.origin_input_ids) - 1
        if limit <= 0 or tree.disable:
            return 0
        key = RadixKey(
            request.origin_input_ids, extra_key=request.extra_key, limit=limit, cache_salt=request.cache_salt
        )
        return int(core.match_full_device_prefix(key)[0])

    return look, FAST_LOOKUPS if "rust" in type(core).__module__ else SLOW_LOOKUPS


def _match_as_sglang_does(tree: Any) -> Callable[[Any], int]:
    """Ask a tree that only offers the match for a batch, which counts as a use of the cache."""
    from sglang.srt.mem_cache.common import match_kv_cache  # type: ignore[import-not-found]

    def match(request: Any) -> int:
        match_kv_cache(request, tree)
        return int(request.num_matched_prefix_tokens)

    return match
