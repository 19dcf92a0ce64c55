"""One simulated replica: a `LocalScheduler` whose iterations take as long as a `CostModel` says."""

from __future__ import annotations

from preble.core.costs.model import CostModel
from preble.core.replica.scheduler import Batch, Lent, LocalScheduler, LocalStats, StepResult
from preble.core.types import KvEvent, PackedTokens, ReplicaId, ReplicaSpec, Request, RequestId
from preble.lab.metrics.itl import GapCounts
from preble.lab.sim.config import SimConfig
from preble.lab.sim.token_gaps import TokenGaps


class SimReplica:
    """Drive it with `begin_iteration` and `end_iteration` in turn.

    `busy_s`: seconds of GPU time spent. `prefill_tokens`: prompt tokens computed, again after a preemption included.
    `num_copies`, `copied_tokens`: what was copied to it. `is_alive`: until it is lost. `is_awake`: an iteration runs or
    is about to.
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
        self._local = LocalScheduler(
            replica_id=replica_id,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
            order=config.order,
        )
        self._gaps = TokenGaps()
        self._batch: Batch | None = None
        self._began_at = 0.0
        self.spec = ReplicaSpec(
            replica_id,
            kv_capacity_tokens=num_blocks * config.block_size,
            block_size=config.block_size,
            reports_events=config.event_delay_s is not None,
            transfer_group="" if config.links is None else config.links.group_of(replica_id),
            splits=config.links is not None and config.links.splits,
        )

    @property
    def num_running(self) -> int:
        return self._local.num_running

    @property
    def num_waiting(self) -> int:
        return self._local.num_waiting

    @property
    def kv_used_tokens(self) -> int:
        """KV of running requests, in whole blocks."""
        return self._local.num_used_blocks * self._local.block_size

    @property
    def stats(self) -> LocalStats:
        return self._local.stats

    def add(self, request: Request, output: PackedTokens, now: float) -> None:
        """Queue a request that will be answered with `output`. Raises: PromptTooLong, RequestError."""
        self._local.add(request, output, now)

    def abort(self, request_id: RequestId) -> None:
        """End a request without a first token at once."""
        self._local.abort(request_id)

    def lend(self, request: Request) -> Lent:
        """Do as `LocalScheduler.lend`."""
        return self._local.lend(request)

    def take_back(self, lent: Lent) -> None:
        """Do as `LocalScheduler.take_back`."""
        self._local.take_back(lent)

    def load(self, request: Request, kept: frozenset[int]) -> bool:
        """Put what another replica has sent of a prompt into the cache; False if that changes nothing."""
        num_blocks = len(self._local.load(request, kept))
        self.num_copies += num_blocks > 0
        self.copied_tokens += num_blocks * self._local.block_size
        return num_blocks > 0

    def caches(self, hashes: frozenset[int]) -> bool:
        """Return whether there are such blocks, and all are in the cache. O(blocks in the cache)."""
        return bool(hashes) and hashes <= self._local.cached_hashes()

    def begin_iteration(self, now: float) -> float | None:
        """Return seconds that the next iteration takes, which runs from now on; None where there is nothing to do."""
        self._batch = self._local.next_batch(now)
        if self._batch is None:
            return None
        self._gaps.preempted(self._batch.preempted)
        self._began_at = now
        return self._slowness * self._batch.iteration_s(self._cost_model)

    def end_iteration(self, now: float) -> StepResult:
        """End the iteration that began last."""
        batch = self._batch
        assert batch is not None, "no iteration runs"
        self._batch = None
        result = self._local.complete(batch, now)
        self._gaps.ended(now, result.prefilled)
        self.busy_s += now - self._began_at
        self.num_iterations += 1
        self.prefill_tokens += batch.num_tokens - len(batch.decodes)
        return result

    def take_gaps(self, request_id: RequestId) -> GapCounts:
        """Return the gaps between the tokens of an answer that the last iteration ended, and forget it."""
        return self._gaps.take(request_id)

    def take_events(self) -> list[KvEvent]:
        """Return what changed in its cache since the last call, in order."""
        return self._local.take_events()

    def lose(self, now: float) -> None:
        """Die. What it spent on the iteration that it could not end counts as spent."""
        self.is_alive = False
        if self._batch is not None:
            self.busy_s += now - self._began_at

    def check(self) -> None:
        """Assert every invariant. O(everything); tests only."""
        self._local.check()
