"""The state of every replica at regular times."""

from __future__ import annotations

import msgspec

from preble.lab.sim.replica import SimReplica


class ReplicaSeries(msgspec.Struct):
    """One replica over time, over its restarts, too: a list a quantity, one value a sample.

    `waiting`, `running`: requests. `kv_used_tokens`: KV of the running ones. `load_s`: L, as the global scheduler sees
    it. `busy_s`, `prefill_tokens`, `hit_tokens`: since it was started last: seconds of GPU time, prompt tokens
    computed, prompt tokens taken from the cache.
    """

    time_s: list[float] = []
    waiting: list[int] = []
    running: list[int] = []
    kv_used_tokens: list[int] = []
    load_s: list[float] = []
    busy_s: list[float] = []
    prefill_tokens: list[int] = []
    hit_tokens: list[int] = []

    def sample(self, replica: SimReplica, load_s: float, now: float) -> None:
        """Add the replica's state of now."""
        self.time_s.append(now)
        self.waiting.append(replica.local.num_waiting)
        self.running.append(replica.local.num_running)
        self.kv_used_tokens.append(replica.local.num_used_blocks * replica.local.block_size)
        self.load_s.append(load_s)
        self.busy_s.append(replica.busy_s)
        self.prefill_tokens.append(replica.prefill_tokens)
        self.hit_tokens.append(replica.local.stats.prefix_hits)
