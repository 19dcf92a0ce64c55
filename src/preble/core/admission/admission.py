"""The way to the fleet: requests are offered, wait for their turn and for room, go, begin to be answered, and end."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import inf

from preble.core.admission.fair_queue import FairQueue, QueueSettings, TurnRefused, Waiting
from preble.core.admission.gate import Gate, Where
from preble.core.costs.model import CostModel
from preble.core.types import Placement, ReplicaId, RequestId

DEPTH_S = 0.05
"""A few iterations' prefill: a tenant that comes anew waits behind it, and less leaves replicas idle."""
_NEWEST = 0.1
"""What the newest request counts for in a tenant's averages."""


@dataclass(slots=True)
class _Habits:
    """What a tenant's requests have been like."""

    missed_share: float = 1.0
    """Of a prompt, the part that is not cached."""
    output_tokens: float = 0.0

    def note_missed(self, share: float) -> None:
        self.missed_share += _NEWEST * (share - self.missed_share)

    def note_output(self, tokens: int) -> None:
        self.output_tokens += _NEWEST * (tokens - self.output_tokens)


@dataclass(slots=True)
class _Running:
    tenant: str
    replica_id: ReplicaId
    prompt_tokens: int
    charged_decode_s: float


class FairAdmission:
    """Decides which request goes to the fleet next, and when. Synchronous; `now` must not go back.

    The driver calls `next` until it gives nothing, whenever something has changed: after `offer`, `begun`, `ended`, a
    change of replicas, and at `next_timer`. It reports with `placed` where the request from `next` went. `depth_s`: see
    `Gate`.
    """

    def __init__(
        self, cost_model: CostModel, settings: QueueSettings | None = None, *, depth_s: float = DEPTH_S
    ) -> None:
        self._cost_model = cost_model
        self._settings = settings or QueueSettings()
        self._queue = FairQueue(self._settings)
        self._gate = Gate(depth_s)
        self._habits: dict[str, _Habits] = {}
        self._waiting: dict[RequestId, Waiting] = {}
        self.running: dict[RequestId, _Running] = {}

    def configure(self, settings: QueueSettings, depth_s: float) -> None:
        """Use other settings from now on. Deadlines that have been set stay."""
        self._settings = self._queue.settings = settings
        self._gate.depth_s = depth_s

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return self._queue.num_waiting

    @property
    def waiting_s(self) -> float:
        """GPU time of the requests that wait, as estimated. O(tenants)."""
        return self._queue.waiting_s

    def cost_s(self, request_id: RequestId) -> float:
        """Return the GPU time of a request that waits, as estimated. Raises: KeyError: it does not wait."""
        return self._waiting[request_id].cost_s

    def used_s(self, tenant: str) -> float:
        """Return the GPU time that counts as used by a tenant, divided by its weight."""
        return self._queue.used_s(tenant)

    def take_untold(self) -> dict[str, float]:
        """Return the GPU time that tenants were charged here since the last call, for other gateways."""
        return self._queue.take_untold()

    def used_elsewhere(self, tenant: str, seconds: float) -> None:
        """A tenant has made the fleet work for so long, through another gateway."""
        self._queue.charge(tenant, seconds, elsewhere=True)

    def set_weight(self, tenant: str, weight: float) -> None:
        """A tenant of weight 2 may have twice as much of the fleet as one of weight 1."""
        self._queue.set_weight(tenant, weight)

    def use(self, cost_model: CostModel) -> None:
        """Estimate with another cost model from now on."""
        self._cost_model = cost_model

    def add_replica(self, replica_id: ReplicaId) -> None:
        """A replica joins, with nothing to do."""
        self._gate.add_replica(replica_id)
        self._queue.num_replicas = self._gate.num_replicas

    def remove_replica(self, replica_id: ReplicaId) -> None:
        """A replica has left; its requests are still to be ended, each by `ended` or by `placed` elsewhere."""
        self._gate.remove_replica(replica_id)
        self._queue.num_replicas = self._gate.num_replicas

    def offer(
        self,
        request_id: RequestId,
        tenant: str,
        num_prompt_tokens: int,
        now: float,
        *,
        rank: int = 0,
        kind: Hashable = None,
        max_wait_s: float | None = None,
        start_by: float | None = None,
    ) -> list[TurnRefused]:
        """Take a request that comes; return who is refused for that, at once: it, or one that waits.

        `rank`: lower ones go first, whoever sends them. `kind`: equal for requests that the same replicas can serve.
        `max_wait_s`: shorter than everybody's. `start_by`: when it must go for its target to be kept; it is taken only
        if that can be, and waits on if it turns out otherwise.
        """
        habits = self._habits_of(tenant)
        cost_s = self._cost_model.prefill_s(num_prompt_tokens) * habits.missed_share
        cost_s += self._cost_model.decode_s(habits.output_tokens, num_prompt_tokens)
        deadline = now + min(self._settings.max_wait_s, inf if max_wait_s is None else max_wait_s)
        entry = self._waiting[request_id] = Waiting(request_id, tenant, cost_s, now, deadline, rank, kind, start_by)
        return self._forget(self._queue.offer(entry, now, self._gate.pending_s))

    def next(self, now: float, where: Callable[[RequestId], Where] = lambda request_id: None) -> RequestId | None:
        """Return the request that is to be placed now; None: there is no room, or nobody waits.

        `where`: the replicas that can serve a request that waits. One that none can serve is called up, to be refused.
        """
        if not self._queue.num_waiting:
            return None
        is_shared = self._queue.num_active > 1

        def has_room(waiting: Waiting, is_owed: bool) -> bool:
            among = where(waiting.request_id)
            if (among is not None and not among) or self._gate.has_room(among, now, is_shared=is_shared):
                return True
            # A tenant that used least does not wait for room that the others have taken.
            return is_owed and self._gate.has_room_of_its_own(among, waiting.tenant)

        entry = self._queue.next(has_room)
        if entry is None:
            return None
        del self._waiting[entry.request_id]
        return entry.request_id

    def placed(self, placement: Placement, tenant: str, now: float, *, streams: bool = True) -> None:
        """A request goes to a replica: its turn came, it was moved, or it did not have to wait.

        `streams`: its answer does, so `first_token` will be called.
        """
        request_id, missed = placement.request_id, placement.num_prompt_tokens - placement.matched_tokens
        if request_id in self.running:
            self._end(request_id, 0)
        habits = self._habits_of(tenant)
        habits.note_missed(missed / max(placement.num_prompt_tokens, 1))
        prefill_s = self._cost_model.prefill_s(missed, placement.matched_tokens)
        decode_s = self._cost_model.decode_s(habits.output_tokens, placement.num_prompt_tokens)
        self._queue.start(tenant, prefill_s + decode_s, now)
        self._gate.sent(placement.replica_id, request_id, tenant, prefill_s, now, streams=streams)
        self.running[request_id] = _Running(tenant, placement.replica_id, placement.num_prompt_tokens, decode_s)

    def first_token(self, request_id: RequestId) -> None:
        """The first token of a placed request has come; further calls change nothing."""
        if (running := self.running.get(request_id)) is not None:
            self._gate.prefilled(running.replica_id, request_id)

    def ended(self, request_id: RequestId, output_tokens: int) -> None:
        """A placed request is over, however it ended. Nothing happens if it is not there."""
        if (running := self.running.get(request_id)) is not None:
            if output_tokens:
                self._habits_of(running.tenant).note_output(output_tokens)
            self._end(request_id, output_tokens)

    def withdraw(self, request_id: RequestId) -> None:
        """A request that waits is given up. Nothing happens if it is not there."""
        if (entry := self._waiting.pop(request_id, None)) is not None:
            self._queue.withdraw(entry)

    def expire(self, now: float) -> list[TurnRefused]:
        """Return those that have waited for as long as they may; they wait no longer."""
        return self._forget(self._queue.expire(now, self._gate.pending_s))

    def next_timer(self, now: float) -> float | None:
        """Return when `expire` or `next` may have something to do, though nothing else happens; None if never.

        To be called when both have nothing to do at `now`; then it is later than that.
        """
        if not self._queue.num_waiting:
            return None
        times = (self._queue.next_deadline(), self._gate.next_assumption(now))
        return min((time for time in times if time is not None), default=None)

    # inside

    def _habits_of(self, tenant: str) -> _Habits:
        return self._habits.setdefault(tenant, _Habits())

    def _forget(self, refused: list[TurnRefused]) -> list[TurnRefused]:
        for refusal in refused:
            self._waiting.pop(refusal.request_id, None)
        return refused

    def _end(self, request_id: RequestId, output_tokens: int) -> None:
        running = self.running.pop(request_id)
        decode_s = self._cost_model.decode_s(output_tokens, running.prompt_tokens)
        self._gate.prefilled(running.replica_id, request_id)
        self._queue.end(running.tenant, decode_s - running.charged_decode_s)
