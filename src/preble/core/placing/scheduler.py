"""The one door of the global half: owns what is believed of the replicas, the load window and the requests in flight.

Source: Preble, "E2 Global Scheduler". Rebalancing and prefix replication come in after placement, from `on_timer`.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

from preble.core.cluster.load_window import LoadWindow
from preble.core.cluster.rebalance import Rebalancer, RebalanceSettings
from preble.core.cluster.replicas import ReplicaTable
from preble.core.costs.model import CostModel
from preble.core.costs.refit import CostFactors, CostRefit, RefitSettings
from preble.core.placing.cache_tracker import CacheTracker
from preble.core.placing.in_flight import InFlightTable
from preble.core.placing.listener import SchedulerListener
from preble.core.placing.snapshot import ReplicaState, SchedulerState
from preble.core.placing.timing_samples import LiveTimes
from preble.core.policies.policy import ClusterView, Policy
from preble.core.prefixes.eviction_cost import EvictionCost
from preble.core.prefixes.index import PrefixIndex
from preble.core.prefixes.radix_tree import Node
from preble.core.replica_index import replicas_in
from preble.core.types import (
    BlocksEvicted,
    BlocksStored,
    CacheCleared,
    Placement,
    PrefixHomeChange,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
)
from preble.errors import NoReplicaError, PromptTooLong, UnknownRequest


class GlobalScheduler:
    """Places every request of a cluster. Synchronous, single-threaded; time comes in as `now`, in seconds.

    `now` must not go back. `seed`: of the generator that breaks ties. `window_s`: H, over which load and popularity are
    counted. `report_grace_s`: how long after a request's end the reports of what it stored may still be under way.
    `belief_ttl_s`: how long an unused prefix is believed to stay on a replica that reports no evictions. `rebalance`:
    for policies that rebalance; the paper's settings if None. `index_budget_bytes`: bound on the memory of the prefix
    index, None for none. At the bound it forgets what was used least recently, and where that is not enough, it takes
    in no new prefixes (`num_unindexed` counts): such requests are placed by load. `refit`: correct the cost model from
    live requests; not if None.
    """

    def __init__(
        self,
        policy: Policy,
        cost_model: CostModel,
        *,
        seed: int = 0,
        window_s: float = 180.0,
        report_grace_s: float = 1.0,
        belief_ttl_s: float = 600.0,
        index_budget_bytes: int | None = None,
        rebalance: RebalanceSettings | None = None,
        refit: RefitSettings | None = None,
    ) -> None:
        self.policy = policy
        self._listeners: list[SchedulerListener] = []
        self._cost_model = cost_model
        self._rng = Random(seed)
        self._fleet = ReplicaTable()
        self._index = PrefixIndex()
        self._window = LoadWindow(cost_model, window_s)
        self._belief = CacheTracker(
            self._index,
            self._fleet,
            self._window,
            report_grace_s=report_grace_s,
            belief_ttl_s=belief_ttl_s,
            index_budget_bytes=index_budget_bytes,
        )
        self._rebalancer = Rebalancer(rebalance or RebalanceSettings(), window_s)
        self._eviction_costs: dict[int, EvictionCost] = {}
        self._refit = CostRefit(cost_model.profile, refit) if refit is not None else None
        live_times = LiveTimes(self._refit, self._fleet) if self._refit is not None else None
        self._flights = InFlightTable(
            self._fleet, self._index, self._window, self._belief, self._rebalancer, live_times
        )

    def listen(self, listener: SchedulerListener) -> None:
        """Report each later call that changes the scheduler to `listener`."""
        self._listeners.append(listener)

    # -- requests -----------------------------------------------------------------------------------------------------

    def place(self, request: Request, now: float) -> Placement:
        """Choose a replica and commit to it: the request is in flight there until `on_finish`.

        O(prompt tokens at memcmp speed + what the policy weighs).
        Raises: NoReplicaError: none is there, or all that are must be avoided. PromptTooLong: none could ever hold it.
        UnknownRequest: a request of this id is in flight already.
        """
        if request.request_id in self._flights:
            raise UnknownRequest(f"request {request.request_id!r} is in flight already")
        try:
            placement = self._place(request, now)
        except (NoReplicaError, PromptTooLong) as error:
            for listener in self._listeners:
                listener.not_placed(request, error, now)
            raise
        for listener in self._listeners:
            listener.placed(request, placement, now)
        return placement

    def _place(self, request: Request, now: float) -> Placement:
        self._expire(now)
        eligible = self._eligible(request)
        match = self._index.match(request.prompt, request.namespace)
        view = ClusterView(
            request,
            eligible,
            match,
            fleet=self._fleet,
            index=self._index,
            window=self._window,
            cost_model=self._cost_model,
            eviction_costs=self._eviction_costs,
            rebalancer=self._rebalancer,
            now=now,
        )
        choice = self.policy.choose(view, self._rng)
        assert eligible >> choice.replica & 1, f"{self.policy.name} chose a replica that it must not"
        matched = view.matched_on(choice.replica)
        prefill_s = view.prefill_s(matched)
        self._flights.start(request, choice.replica, matched, prefill_s, match, choice.prefix, now)
        return Placement(
            request.request_id,
            self._fleet.replica_id(choice.replica),
            choice.reason,
            matched,
            request.num_prompt_tokens,
            choice.candidates,
            self._fleet.untrusted_ids,
        )

    def move(self, request_id: RequestId, to: ReplicaId, now: float) -> None:
        """The driver had to send a request elsewhere than it was placed: its load and its prefix go with it.

        Raises: UnknownRequest: it is not in flight. NoReplicaError: there is no replica of that name.
        """
        if to not in self._fleet:
            raise NoReplicaError(f"cannot move request {request_id!r}: there is no replica {to!r}")
        flight = self._flights.get(request_id)
        self._flights.withdraw(flight, now)
        request, replica = flight.request, self._fleet.replica(to)
        match = self._index.match(request.prompt, request.namespace)
        matched = self._belief.usable_tokens(replica, request, match) if self._fleet.trusts(replica) else 0
        prefill_s = self._cost_model.prefill_s(request.num_prompt_tokens - matched, matched)
        self._flights.start(request, replica, matched, prefill_s, match, None, now)
        for listener in self._listeners:
            listener.moved(request_id, to, now)

    def on_first_token(self, request_id: RequestId, now: float) -> None:
        """The first output token arrived: the prompt is computed. Further calls change nothing.

        Raises: UnknownRequest: the request is not in flight.
        """
        self._flights.first_token(self._flights.get(request_id), now)
        for listener in self._listeners:
            listener.first_token(request_id, now)

    def on_finish(
        self, request_id: RequestId, output_tokens: int, now: float, *, cached_tokens: int | None = None
    ) -> None:
        """The request is over, however it ended; to be called exactly once for each one placed.

        `output_tokens`: how many there were; 0 without a first token means that its work was not done. `cached_tokens`:
        prompt tokens that the replica says it had cached, None if it does not say.
        Raises: UnknownRequest: it is not in flight.
        """
        self._flights.finish(self._flights.get(request_id), output_tokens, cached_tokens, now)
        for listener in self._listeners:
            listener.finished(request_id, output_tokens, cached_tokens, now)

    # -- what replicas report -----------------------------------------------------------------------------------------

    def on_stored(self, event: BlocksStored, now: float) -> bool:
        """A replica caches further blocks. False if they could not be placed, since what is before them is unknown.

        Events of a replica that is not in the fleet are ignored.
        """
        located = True
        if event.replica_id in self._fleet and event.block_hashes:
            located = self._belief.stored(self._fleet.replica(event.replica_id), event, now)
        for listener in self._listeners:
            listener.stored(event, located, now)
        return located

    def on_evicted(self, event: BlocksEvicted | CacheCleared, now: float) -> None:
        """A replica no longer caches these blocks, or anything."""
        if event.replica_id in self._fleet:
            replica = self._fleet.replica(event.replica_id)
            if isinstance(event, CacheCleared):
                self._belief.cleared(replica, now, is_past=event.is_past)
            else:
                self._belief.evicted(replica, event, now)
        for listener in self._listeners:
            listener.evicted(event, now)

    # -- the fleet ----------------------------------------------------------------------------------------------------

    def add_replica(self, spec: ReplicaSpec, now: float) -> None:
        """A replica with an empty cache joins. Raises: ValueError: one of that name is there already."""
        if spec.replica_id in self._fleet:
            raise ValueError(f"replica {spec.replica_id!r} is in the fleet already")
        replica = self._fleet.add(spec)
        self._belief.add_replica(replica, now)
        self._window.add_replica(replica)
        self._eviction_costs[replica] = EvictionCost(self._index.caches[replica], self._cost_model)
        for listener in self._listeners:
            listener.replica_added(spec, now)

    def remove_replica(self, replica_id: ReplicaId, now: float) -> list[Request]:
        """A replica left or died. Returns its requests, which are in flight no longer and may be placed again.

        Nothing of it is kept. Raises: NoReplicaError: there is no replica of that name.
        """
        if replica_id not in self._fleet:
            raise NoReplicaError(f"there is no replica {replica_id!r} to remove")
        replica = self._fleet.replica(replica_id)
        orphans = self._flights.remove_replica(replica)
        self._window.remove_replica(replica)
        self._rebalancer.remove_replica(replica)
        self._belief.remove_replica(replica)
        self._fleet.remove(replica_id)
        del self._eviction_costs[replica]
        for listener in self._listeners:
            listener.replica_removed(replica_id, now)
        return orphans

    def set_trust(self, replica_id: ReplicaId, trusted: bool, now: float) -> None:
        """Whether what is believed to be cached on a replica counts; it does when a replica joins.

        On one that is not trusted every match counts as 0 tokens for decisions and for the work that they place. What
        is believed of it goes on being kept and held against its reports, so that trust can come back at any time.
        Raises: NoReplicaError: there is no replica of that name.
        """
        if replica_id not in self._fleet:
            raise NoReplicaError(f"there is no replica {replica_id!r} to trust or not")
        self._fleet.set_trust(self._fleet.replica(replica_id), trusted)
        for listener in self._listeners:
            listener.trust_changed(replica_id, trusted, now)

    # -- time ---------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """When `on_timer` has something to do next; None if nothing is pending."""
        earliest = self._belief.next_timer()
        corrected_at = self._refit.due_at if self._refit is not None else None
        for due in (self._window.next_expiry(), self._rebalancer.next_search(), corrected_at):
            if due is not None and due < earliest:
                earliest = due
        return None if earliest == inf else earliest

    def on_timer(self, now: float) -> list[PrefixHomeChange]:
        """Expiry of the window, of promises that were not kept, of beliefs that nothing confirmed; rebalancing; the
        correction of the cost model.

        Returns which prefixes were replicated or retired; nothing has to be done about that but to tell.
        """
        self._expire(now)
        changes = self._rebalance(now)
        self._belief.expire_old(now)
        corrected = self._refit.refit(now) if self._refit is not None else None
        if corrected is not None:
            self._use(corrected)
        for listener in self._listeners:
            listener.timer_ran(now)
        return changes

    def _use(self, cost_model: CostModel) -> None:
        """Reckon with another model from now on; see docs/decisions/0006. O(replicas)."""
        self._cost_model = cost_model
        self._window.use(cost_model)
        for replica in self._fleet.specs:
            self._eviction_costs[replica] = EvictionCost(self._index.caches[replica], cost_model)

    def _rebalance(self, now: float) -> list[PrefixHomeChange]:
        search_at = self._rebalancer.next_search()
        if search_at is None or search_at > now:
            return []
        cluster = _ClusterForRebalancing(self._fleet, self._index, self._window, self._cost_model)
        return [
            PrefixHomeChange(self._fleet.replica_id(change.replica), change.node.end, change.added, change.num_homes)
            for change in self._rebalancer.search(cluster, now)
        ]

    # -- reading ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> SchedulerState:
        """The scheduler's state now, as one value. O(replicas)."""
        return SchedulerState(
            num_in_flight=len(self._flights),
            num_index_tokens=self._index.tree.num_tokens,
            num_index_bytes=self._index.num_bytes,
            num_unindexed=self._belief.num_unindexed,
            num_replicated_prefixes=self._rebalancer.num_replicated,
            cost_factors=self._refit.factors if self._refit is not None else CostFactors(),
            replicas={self._fleet.replica_id(replica): self._replica(replica) for replica in self._fleet.live_replicas},
        )

    def matched_tokens(self, replica_id: ReplicaId, request: Request) -> int:
        """Leading tokens of a prompt that a replica is believed, trusted or not, to serve from its cache now.

        Changes nothing. Raises: KeyError: there is no replica of that name.
        """
        match = self._index.match(request.prompt, request.namespace)
        return self._belief.usable_tokens(self._fleet.replica(replica_id), request, match)

    def check(self) -> None:
        """Every invariant. O(everything); for tests."""
        self._index.check()
        self._window.check()
        self._flights.check()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _replica(self, replica: int) -> ReplicaState:
        return ReplicaState(
            num_requests=self._fleet.num_requests[replica],
            waiting_prefill_tokens=self._fleet.waiting_prefill_tokens[replica],
            load_s=self._window.load_s[replica],
            cached_tokens=self._index.caches[replica].used_tokens,
            drift=replace(self._belief.drift(replica)),
            trusted=self._fleet.trusts(replica),
        )

    def _eligible(self, request: Request) -> int:
        if not self._fleet.live:
            raise NoReplicaError("no replica is available")
        fitting = self._fleet.fitting(request.num_prompt_tokens)
        if not fitting:
            raise PromptTooLong(
                f"the prompt has {request.num_prompt_tokens} tokens; "
                f"the longest that a replica takes is {self._fleet.longest_prompt}"
            )
        eligible = fitting & ~self._fleet.mask(request.avoid)
        if not eligible:
            raise NoReplicaError("no other replica is available")
        return eligible

    def _expire(self, now: float) -> None:
        for replica, leaf in self._window.expire(now):
            self._index.forget_use(replica, leaf)
        self._belief.expire_pending_reports(now)


class _ClusterForRebalancing:
    """What `Rebalancer.search` may ask, answered from the scheduler's own state.

    Only trusted replicas can hold a prefix or become a home: on others no match would ever count.
    """

    def __init__(self, fleet: ReplicaTable, index: PrefixIndex, window: LoadWindow, cost_model: CostModel) -> None:
        self.live_replicas = replicas_in(fleet.trusted)
        self._trusted = fleet.trusted
        self.load_s = window.load_s
        self._index = index
        self._cost_model = cost_model

    def recompute_s(self, node: Node) -> float:
        return self._cost_model.prefill_s(node.end)

    def holders(self, node: Node) -> list[int]:
        return replicas_in(node.full_holders & self._trusted)

    def window_requests(self, node: Node) -> int:
        return node.recent_uses
