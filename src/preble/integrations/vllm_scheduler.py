"""vLLM's scheduler with Preble's order of the waiting requests and no other change.

    vllm serve MODEL --scheduler-cls preble.integrations.vllm_scheduler.PrebleAsyncScheduler

`PrebleAsyncScheduler` where vLLM schedules ahead of the GPU (its default there), `PrebleScheduler` elsewhere (on a CPU,
or with --no-async-scheduling). The order is set by `--additional-config '{"preble": {"order": "groups"}}'` or by
PREBLE_QUEUE_ORDER and PREBLE_QUEUE_GROUPS; see docs/howto/vllm.md.

It sorts the waiting list in place before each batch. vLLM then takes requests from the head of the list while it has
tokens, places and blocks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import vllm  # type: ignore[import-not-found]
from vllm.logger import init_logger  # type: ignore[import-not-found]

from preble.core.replica.waiting_queue import QueueOrder
from preble.errors import ConfigError
from preble.integrations.settings import OrderSettings, require_version
from preble.integrations.waiting_line import WaitingLine

KNOWN_VERSION = "0.32"

# Before vLLM's internals are imported: another version may lack them.
require_version("vLLM", vllm.__version__, KNOWN_VERSION, os.environ)

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # type: ignore[import-not-found]  # noqa: E402
from vllm.v1.core.sched.request_queue import FCFSRequestQueue  # type: ignore[import-not-found]  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]  # noqa: E402

from preble.integrations.vllm_cache import cached_tokens_in  # noqa: E402

logger = init_logger("vllm.preble")  # vLLM shows what is logged below its own name


class PrebleScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's `Scheduler`, its waiting list in Preble's order."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Take what `Scheduler` takes. Raises: ConfigError: a bad option, or vLLM orders by priority."""
        super().__init__(vllm_config, *args, **kwargs)
        settings = OrderSettings.read(os.environ, _options(vllm_config.additional_config))
        if not isinstance(self.waiting, FCFSRequestQueue):
            raise ConfigError("Preble orders the waiting requests; start vLLM with --scheduling-policy fcfs")
        self._preble_is_on = settings.order is not QueueOrder.FCFS
        self._preble_cache = cached_tokens_in(self.kv_cache_manager)
        self._preble_line = WaitingLine[Any](
            settings,
            num_tokens=lambda request: request.num_tokens,
            cached_tokens=self._preble_cache.of,
            on_gone=self._preble_cache.forget,
        )
        logger.info("Preble orders waiting requests: %s, %d groups", settings.order, settings.num_groups)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Return vLLM's next batch, made from the waiting list in Preble's order."""
        # With all places taken no request is admitted, whatever the order.
        if self._preble_is_on and len(self.running) < self.max_num_active_reqs:
            self.arrange_waiting()
        return super().schedule(*args, **kwargs)

    def arrange_waiting(self) -> None:
        """Sort the waiting list. O(waiting).

        Requests that vLLM has put in front stay there in its order: preempted ones, and those that it had to skip
        (their grammar is being compiled, or their adapter has no place).
        """
        if not self.waiting and not self._preble_line:
            return
        in_front, others = [], {}
        for request in self.waiting:
            if request.num_preemptions or request in self.deferred_waiting:
                in_front.append(request)
            else:
                others[request.request_id] = request
        self._preble_cache.new_batch()
        arranged = self._preble_line.arrange(others)
        self.waiting.clear()
        self.waiting.extend(in_front)
        self.waiting.extend(arranged)


class PrebleAsyncScheduler(PrebleScheduler, AsyncScheduler):  # type: ignore[misc]
    """vLLM's `AsyncScheduler`, its waiting list in Preble's order."""


def _options(additional_config: object) -> Mapping[str, object]:
    """Return Preble's part of vLLM's --additional-config. Raises: ConfigError: not a table."""
    options = additional_config.get("preble", {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(options, Mapping):
        raise ConfigError(
            f'"preble" in --additional-config must be a table such as {{"order": "lpm"}}, not {options!r}'
        )
    return options
