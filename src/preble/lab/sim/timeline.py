"""The state of every replica at regular times."""

from __future__ import annotations

import msgspec

from preble.lab.sim.replica import SimReplica


class ReplicaSeries(msgspec.Struct):
    """One replica over time: a list a quantity, one value a sample.

    `waiting`, `running`: requests. `kv_used_tokens`: KV of the running ones. `load_s`: L, as the global scheduler sees
    it. `busy_s`, `prefill_tokens`, `hit_tokens`: since the start: seconds of GPU time, prompt tokens computed, prompt
    tokens taken from the cache.
    """

    time_s: list[float] = []
    waiting: list[int] = []
    running: list[int] = []
    kv_used_tokens: list[int] = []
    load_s: list[float] = []
    busy_s: list[float] = []
    prefill_tokens: list[int] = []
    hit_tokens: list[int] = []


class Timeline:
    """Samples by replica name; a replica that restarts goes on in its series with counts from 0."""

    def __init__(self) -> None:
        self.series: dict[str, ReplicaSeries] = {}

    def sample(self, replica: SimReplica, load_s: float, now: float) -> None:
        """Add the replica's state of now. `load_s`: L, as the global scheduler sees it."""
        series = self.series.setdefault(replica.replica_id, ReplicaSeries())
        series.time_s.append(now)
        series.waiting.append(replica.local.num_waiting)
        series.running.append(replica.local.num_running)
        series.kv_used_tokens.append(replica.local.num_used_blocks * replica.local.block_size)
        series.load_s.append(load_s)
        series.busy_s.append(replica.busy_s)
        series.prefill_tokens.append(replica.prefill_tokens)
        series.hit_tokens.append(replica.local.stats.prefix_hits)
