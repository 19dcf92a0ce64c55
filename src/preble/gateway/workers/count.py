"""How many front-end processes a gateway starts."""

from __future__ import annotations

import math
import os
from pathlib import Path

from preble.config import GatewayConfig
from preble.engines.registry import may_be_own

MOST = 4
"""With streams one scheduler process feeds three to four front ends (docs/performance.md); each takes memory."""
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def num_front_ends(config: GatewayConfig, quota: Path = _QUOTA) -> int:
    """Return how many front-end processes to start, 0 for one process that does all: the setting, or as many as there
    are cores beside the scheduler's.

    An adapter of the user's own may keep what it learns by probing, and front ends do not probe: then 0.
    """
    if config.workers is not None:
        return config.workers
    engines = {config.engine, *(each.engine for each in config.replicas), *(each.engine for each in config.groups)}
    if any(may_be_own(engine) for engine in engines if engine is not None):
        return 0
    return min(usable_cores(quota) - 1, MOST)


def usable_cores(quota: Path = _QUOTA) -> int:
    """Return how many cores this process may use: at least 1. `quota`: where a container's limit is, `cpu.max`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        microseconds, _, period = quota.read_text().partition(" ")
        limit = math.ceil(int(microseconds) / int(period))
    except (OSError, ValueError, ZeroDivisionError):  # there is no limit, or another kind of system
        return cores
    return max(min(cores, limit), 1)
