"""The simulated transfers of KV between replicas: copies, and splits, whose source computes the prompt first.

A link carries one transfer at a time into a replica, and one out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import inf

from preble.core.costs.model import CostModel
from preble.core.replica.sequence import Finished
from preble.core.types import (
    PART_OF_LEASE,
    TOKEN_BYTES,
    PackedTokens,
    Placement,
    Request,
    Role,
    Transfer,
    TransferKind,
)
from preble.errors import RequestError
from preble.lab.sim.agenda import Agenda, Priority
from preble.lab.sim.calls import Call
from preble.lab.sim.fleet import SimFleet
from preble.lab.sim.replica import SimReplica


class _Links:
    """When transfers begin and how long they take; `cost_model` has the links' rate and latency."""

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model
        self._sending_until: dict[SimReplica, float] = {}
        self._receiving_until: dict[SimReplica, float] = {}

    def seconds(self, transfer: Transfer) -> float:
        """Return how long a transfer takes once it has begun."""
        return self._cost_model.link_s(transfer.tokens) + self._cost_model.link_latency_s

    def reserve(self, source: SimReplica, target: SimReplica, transfer: Transfer, now: float) -> float:
        """Return when the transfer begins, `now` or later. Both links are busy with it until its end."""
        free = self._sending_until.get(source, -inf), self._receiving_until.get(target, -inf)
        start = max(now, *free)
        until = start + self._cost_model.link_s(transfer.tokens)
        self._sending_until[source] = self._receiving_until[target] = until
        return start


class Copy:
    """One copy that has begun: its source keeps what it sends. `kept_until_s`: if its target is lost, when the source
    lets go: vLLM with NIXL hears of nothing, and keeps it for its lease.
    """

    def __init__(self, request: Request, source: SimReplica, target: SimReplica, kept_until_s: float = -inf) -> None:
        self._request, self._source, self._target = request, source, target
        self.kept_until_s = kept_until_s
        self._lent = source.local.lend(request)

    @property
    def has_source(self) -> bool:
        """Whether its source was not lost."""
        return self._source.is_alive

    @property
    def has_target(self) -> bool:
        """Whether its target was not lost."""
        return self._target.is_alive

    def let_go(self, now: float) -> None:
        """Have the source keep it no longer, though nobody has fetched it."""
        self._source.local.take_back(self._lent)

    def end(self) -> bool:
        """Put what was sent into the target's cache. Return False if there was nothing, or the source was lost.

        Another request may have had it computed there meanwhile.
        """
        self._source.local.take_back(self._lent)
        if not self.has_source:
            return False
        return self._target.load(self._request, self._lent.hashes) or self._target.caches(self._lent.hashes)


class Transfers:
    """The transfers that are under way. `on_end` hears of each that is over, and whether the prefix is there; not of
    one whose request has been placed again since. `on_lost` hears instead of one that lost its source, where the target
    only decodes.
    """

    def __init__(
        self,
        fleet: SimFleet,
        agenda: Agenda,
        cost_model: CostModel,
        on_end: Callable[[Call, bool, float], None],
        on_lost: Callable[[Call, float], None],
    ) -> None:
        self._fleet = fleet
        self._agenda = agenda
        self._links = _Links(cost_model)
        self._on_end, self._on_lost = on_end, on_lost

    def start(self, call: Call, placement: Placement, now: float) -> None:
        """Let a placement's copy wait for the links, or its source compute the prompt."""
        transfer, target = placement.transfer, call.replica
        if call.placement is not placement or target is None:
            return
        assert transfer is not None
        source = self._fleet.live.get(transfer.source)
        if source is None:
            self._end(call, placement, None, now)
        elif transfer.kind is TransferKind.PREFILL:
            self._start_leg(call, placement, source, now)
        else:
            begins_s = self._links.reserve(source, target, transfer, now)
            self._agenda.at(begins_s, Priority.ARRIVAL, partial(self._begin_copy, call, placement, source, target))

    def end_leg(self, call: Call, source: SimReplica, finished: Finished, now: float) -> None:
        """The source has computed the prompt, and keeps it until it has sent it."""
        placement, target = call.placement, call.replica
        assert placement is not None and placement.transfer is not None and target is not None
        source.gaps.take(finished.request_id)
        call.leg, call.leg_cached = None, finished.num_cached_tokens
        begins_s = self._links.reserve(source, target, placement.transfer, now)
        copy = Copy(call.request, source, target, now + source.lease_s)
        ends_s = begins_s + self._links.seconds(placement.transfer)
        self._agenda.at(ends_s, Priority.ARRIVAL, partial(self._end, call, placement, copy))

    def give_up_legs(self, calls: Iterable[Call], now: float) -> None:
        """End the legs whose source was lost."""
        for call in [call for call in calls if call.leg is not None and not call.leg.is_alive]:
            assert call.placement is not None
            self._give_up_leg(call, call.placement, now)

    def _give_up_leg(self, call: Call, placement: Placement, now: float) -> None:
        """Have the target compute the prompt, if its source has not by now."""
        if call.leg is None or call.placement is not placement:
            return
        call.leg.local.abort(call.request.request_id)
        call.leg = None
        self._end(call, placement, None, now)

    def _begin_copy(self, call: Call, placement: Placement, source: SimReplica, target: SimReplica, now: float) -> None:
        if call.placement is not placement:
            return
        copy = Copy(call.request, source, target)
        assert placement.transfer is not None
        ends_s = now + self._links.seconds(placement.transfer)
        self._agenda.at(ends_s, Priority.ARRIVAL, partial(self._end, call, placement, copy))

    def _start_leg(self, call: Call, placement: Placement, source: SimReplica, now: float) -> None:
        """Let the source of a split compute the prompt, up to the first token."""
        try:
            source.local.add(call.request, PackedTokens(call.answer[:TOKEN_BYTES]), now)
        except RequestError:
            self._end(call, placement, None, now)
            return
        call.leg = source
        self._fleet.wake(source, now)
        if source.spec.role is Role.MIXED:  # those with fixed roles wait for each other
            late_s = now + PART_OF_LEASE * source.lease_s
            self._agenda.at(late_s, Priority.ARRIVAL, partial(self._give_up_leg, call, placement))

    def _end(self, call: Call, placement: Placement, copy: Copy | None, now: float) -> None:
        """A transfer is there, or has failed. Nobody hears of it if the target was lost meanwhile."""
        if copy is not None and not copy.has_target:
            self._agenda.at(max(now, copy.kept_until_s), Priority.REPORT, copy.let_go)
            return
        has_come = copy is not None and copy.end()
        if not has_come:
            call.leg_cached = None
        if call.placement is not placement or call.replica is None:
            return
        if call.replica.spec.role is Role.DECODE and (copy is None or not copy.has_source):
            self._on_lost(call, now)
        else:
            self._on_end(call, has_come, now)
