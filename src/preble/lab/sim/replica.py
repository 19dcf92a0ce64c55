"""One simulated replica: a `LocalScheduler` whose iterations take as long as a `CostModel` says."""

from __future__ import annotations

from preble.core.costs.model import CostModel
from preble.core.replica.scheduler import Batch, LocalScheduler, StepResult
from preble.core.types import ReplicaId, ReplicaSpec, Request, Role
from preble.lab.sim.config import SimConfig
from preble.lab.sim.token_gaps import TokenGaps


class SimReplica:
    """Drive it with `begin_iteration` and `end_iteration` in turn.

    `local`: what waits, runs and is cached on it. `gaps`: between the tokens of its answers.
    `busy_s`: seconds of GPU time spent. `prefill_tokens`: prompt tokens computed, again after a preemption included.
    `num_copies`, `copied_tokens`: what was copied to it. `is_alive`: until it is lost. `is_awake`: an iteration runs or
    is about to. `lease_s`: how long it keeps a prompt that nobody fetches.
    """

    def __init__(self, replica_id: ReplicaId, config: SimConfig, cost_model: CostModel) -> None:
        self.replica_id = replica_id
        self.is_alive = True
        self.is_awake = False
        self.busy_s = 0.0
        self.prefill_tokens = 0
        self.num_iterations = 0
        self.num_copies = 0
        self.copied_tokens = 0
        self._cost_model = cost_model
        self._slowness = 1.0 / config.speeds.get(replica_id, 1.0)
        num_blocks = config.blocks_of(replica_id)
        self.local = LocalScheduler(
            replica_id=replica_id,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
            order=config.order,
        )
        self.gaps = TokenGaps()
        self.lease_s = 0.0 if config.links is None else config.links.lease_s
        self._batch: Batch | None = None
        self._began_at = 0.0
        self.spec = ReplicaSpec(
            replica_id,
            kv_capacity_tokens=num_blocks * config.block_size,
            block_size=config.block_size,
            reports_events=config.event_delay_s is not None,
            transfer_group="" if config.links is None else config.links.group_of(replica_id),
            splits=config.links is not None and config.links.splits,
            role=config.role_of(replica_id),
            answers_alone=config.role_of(replica_id) is not Role.DECODE,  # as SGLang's
        )

    def load(self, request: Request, kept: frozenset[int]) -> bool:
        """Put what another replica has sent of a prompt into the cache; False if that changes nothing."""
        num_blocks = len(self.local.load(request, kept))
        self.num_copies += num_blocks > 0
        self.copied_tokens += num_blocks * self.local.block_size
        return num_blocks > 0

    def caches(self, hashes: frozenset[int]) -> bool:
        """Return whether there are such blocks, and all are in the cache. O(blocks in the cache)."""
        return bool(hashes) and hashes <= self.local.cached_hashes()

    def begin_iteration(self, now: float) -> float | None:
        """Return seconds that the next iteration takes, which runs from now on; None where there is nothing to do."""
        self._batch = self.local.next_batch(now)
        if self._batch is None:
            return None
        self.gaps.preempted(self._batch.preempted)
        self._began_at = now
        return self._slowness * self._batch.iteration_s(self._cost_model)

    def end_iteration(self, now: float) -> StepResult:
        """End the iteration that began last."""
        batch = self._batch
        assert batch is not None, "no iteration runs"
        self._batch = None
        result = self.local.complete(batch, now)
        self.gaps.ended(now, result.prefilled)
        self.busy_s += now - self._began_at
        self.num_iterations += 1
        self.prefill_tokens += batch.num_tokens - len(batch.decodes)
        return result

    def lose(self, now: float) -> None:
        """Die. What it spent on the iteration that it could not end counts as spent."""
        self.is_alive = False
        if self._batch is not None:
            self.busy_s += now - self._began_at
