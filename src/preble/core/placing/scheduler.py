"""The global scheduler: the one interface of the global half.

Source: Preble, "E2 Global Scheduler". For policies that rebalance, `on_timer` replicates prefixes after placement.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from math import inf
from random import Random

from preble.core.cluster.rebalance import RebalanceSettings
from preble.core.cluster.replicas import longest_prompt
from preble.core.cluster.state import ClusterState
from preble.core.costs.model import CostModel
from preble.core.costs.refit import CostFactors, CostRefit, RefitSettings
from preble.core.placing.assumed import AssumedRequests, own_id
from preble.core.placing.cache_tracker import CacheTracker
from preble.core.placing.in_flight import InFlightTable
from preble.core.placing.listener import SchedulerListener
from preble.core.placing.snapshot import HotPrefix, ReplicaState, SchedulerState
from preble.core.placing.timing_samples import TimingSamples
from preble.core.policies.policy import Policy
from preble.core.policies.view import ClusterView
from preble.core.prefixes.cache_entry import NAME_BYTES
from preble.core.prefixes.hottest import hottest
from preble.core.prefixes.radix_tree import Match
from preble.core.replica_index import ReplicaIndex, ReplicaSet, replicas_in
from preble.core.types import (
    TOKEN_BYTES,
    BlocksDemoted,
    BlocksShared,
    BlocksStored,
    CacheChange,
    CacheCleared,
    EventsLost,
    PackedTokens,
    PeerEnded,
    PeerEvent,
    PeerFirstToken,
    PeerHeld,
    PeerId,
    PeerPlaced,
    Placement,
    PrefixReplication,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
)
from preble.errors import NoReplicaError, PolicyError, PromptTooLong, UnknownRequest

_INDEX_BYTES_PER_TOKEN = 5.5
"""Of the prefix index, beside the name of each block: up to that much was measured (docs/performance.md)."""

_NAMED_BYTES = 64 * TOKEN_BYTES
"""How much of a prefix's run its name is a hash of."""


class GlobalScheduler:
    """Places every request of a cluster. Synchronous, single-threaded; time comes in as `now`, in seconds.

    `now` must not go back. `seed`: of the generator that breaks ties. `window_s`: H, the time over which load and
    popularity are counted. `report_grace_s`: how long after a request's end a replica may still report what the request
    stored. `belief_ttl_s`: how long an unused prefix counts as cached on a replica that reports no evictions.
    `rebalance`: for policies that rebalance; the paper's settings if None. `index_budget_bytes`: the most memory that
    the prefix index may take, None for no limit. At the limit the index forgets what was used least recently. If that
    is not enough, it takes in no new prefixes (`SchedulerState.num_unindexed` counts them), and such requests are
    placed by load. `refit`: how to correct the cost model from live requests, None for not at all.
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
        self._index_budget_bytes = index_budget_bytes
        self._listeners: list[SchedulerListener] = []
        self._rng = Random(seed)
        self._cluster = ClusterState(cost_model, window_s, rebalance or RebalanceSettings())
        self._replicas = self._cluster.replicas
        self._tracker = CacheTracker(
            self._cluster,
            report_grace_s=report_grace_s,
            belief_ttl_s=belief_ttl_s,
            index_budget_bytes=index_budget_bytes,
        )
        self._refit = CostRefit(cost_model.profile, refit) if refit is not None else None
        timing = TimingSamples(self._cluster, self._refit)
        self._in_flight = InFlightTable(self._cluster, self._tracker, timing)
        self._assumed = AssumedRequests(self._in_flight)

    def listen(self, listener: SchedulerListener) -> None:
        """Report each later call that changes the scheduler to `listener`."""
        self._listeners.append(listener)

    # -- requests -----------------------------------------------------------------------------------------------------

    def place(self, request: Request, now: float) -> Placement:
        """Choose a replica and commit to it: the request is in flight there until `on_finish`.

        O(prompt tokens at memcmp speed + what the policy weighs).
        Raises: NoReplicaError: there is no replica, or the request must avoid each of them. PromptTooLong: no replica
        can hold it. UnknownRequest: a request of this id is in flight already. PolicyError: the policy chose a
        replica that is no candidate.
        """
        if request.request_id in self._in_flight:
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
        match = self._match(request, request.model)
        view = ClusterView(request, eligible, match, self._cluster, now)
        choice = self.policy.choose(view, self._rng)
        if choice.replica < 0 or not eligible >> choice.replica & 1:
            raise PolicyError(
                f"policy {self.policy.name!r} chose replica index {choice.replica}, which is none of {view.replicas}"
            )
        matched = view.matched_on(choice.replica)
        prefill_s = view.prefill_s(matched) + view.loading_s(choice.replica)
        prefix = match.node_at(choice.prefix_tokens) if choice.prefix_tokens else None
        self._in_flight.start(request, choice.replica, matched, prefill_s, match, prefix, eligible, now)
        return Placement(
            request.request_id,
            self._replicas.replica_id(choice.replica),
            choice.reason,
            matched,
            request.num_prompt_tokens,
            choice.candidates,
            self._replicas.untrusted_ids,
        )

    def move(self, request_id: RequestId, to: ReplicaId, now: float) -> None:
        """The driver sent a request to another replica than it was placed on: its load and its prefix move there.

        Raises: UnknownRequest: it is not in flight. NoReplicaError: there is no replica of that name.
        """
        if to not in self._replicas:
            raise NoReplicaError(f"cannot move request {request_id!r}: there is no replica {to!r}")
        entry = self._in_flight.get(request_id)
        self._in_flight.withdraw(entry, now)
        request, replica = entry.request, self._replicas.replica(to)
        match = self._match(request, request.model)
        matched = self._tracker.usable_tokens(replica, request, match) if self._replicas.trusts(replica) else 0
        prefill_s = self._cluster.cost_model.prefill_s(request.num_prompt_tokens - matched, matched)
        self._in_flight.start(request, replica, matched, prefill_s, match, None, 0, now)
        for listener in self._listeners:
            listener.moved(request_id, to, now)

    def on_first_token(self, request_id: RequestId, now: float) -> None:
        """The first output token has arrived, so the prompt is computed. Further calls change nothing.

        Raises: UnknownRequest: the request is not in flight.
        """
        self._in_flight.first_token(self._in_flight.get(request_id), now)
        for listener in self._listeners:
            listener.first_token(request_id, now)

    def on_finish(
        self, request_id: RequestId, output_tokens: int, now: float, *, cached_tokens: int | None = None
    ) -> None:
        """The request is over, whether finished, aborted or failed. Call it exactly once for each placed request.

        `output_tokens`: their number; 0 without a first token means that the work was not done. `cached_tokens`: the
        prompt tokens that the replica reports as cached, None if it does not report them.
        Raises: UnknownRequest: it is not in flight.
        """
        self._in_flight.finish(self._in_flight.get(request_id), output_tokens, cached_tokens, now)
        for listener in self._listeners:
            listener.finished(request_id, output_tokens, cached_tokens, now)

    # -- what other gateways report -----------------------------------------------------------------------------------

    def assume(self, event: PeerEvent, now: float) -> bool:
        """Take what another gateway tells: it placed a request, saw its first token or end, or had a prompt computed.

        Until its end, the request counts here like our own: its load, and its prompt as about to be cached. Events may
        come twice, in any order, or not at all. Returns whether the event changed anything: we ignore one of an unknown
        request or replica, and one that makes no sense.
        """
        if isinstance(event, PeerPlaced):
            changed = self._assume_placed(event, now)
        elif isinstance(event, PeerFirstToken):
            changed = (own := own_id(event.peer, event.request_id)) in self._in_flight
            if changed:
                self._in_flight.first_token(self._in_flight.get(own), now, seen=False)
        elif isinstance(event, PeerHeld):
            changed = self._assume_held(event, now)
        else:
            changed = self._assume_ended(event, now)
        for listener in self._listeners:
            listener.assumed(event, now)
        return changed

    def _assume_placed(self, event: PeerPlaced, now: float) -> bool:
        num_tokens, prompt = event.num_prompt_tokens, event.prompt or PackedTokens(b"")
        if event.replica_id not in self._replicas or not self._assumed.is_new(event):
            return False
        replica = self._replicas.replica(event.replica_id)
        spec = self._replicas.specs[replica]
        if not 0 < num_tokens <= longest_prompt(spec) or len(prompt) not in (0, num_tokens * TOKEN_BYTES):
            return False
        self._expire(now)
        own = own_id(event.peer, event.request_id)
        request = Request(own, prompt, namespace=event.namespace, model=spec.model)
        match = self._match(request, spec.model)
        matched = event.matched_tokens
        if matched is None:
            matched = self._tracker.usable_tokens(replica, request, match) if self._replicas.trusts(replica) else 0
        matched = min(max(matched, 0), num_tokens)
        prefill_s = self._cluster.cost_model.prefill_s(num_tokens - matched, matched)
        self._in_flight.start(request, replica, matched, prefill_s, match, None, 0, now, assumed_tokens=num_tokens)
        self._assumed.start(event)
        return True

    def _assume_held(self, event: PeerHeld, now: float) -> bool:
        if event.replica_id not in self._replicas or len(event.prompt) % TOKEN_BYTES:
            return False
        replica = self._replicas.replica(event.replica_id)
        model = self._replicas.specs[replica].model
        request = Request(RequestId(""), event.prompt, namespace=event.namespace, model=model)
        if request.num_prompt_tokens > longest_prompt(self._replicas.specs[replica]):
            return False
        self._expire(now)
        return self._tracker.computed_elsewhere(replica, request, self._match(request, model), now)

    def _assume_ended(self, event: PeerEnded, now: float) -> bool:
        own = self._assumed.end(event)
        if own is None:
            return False
        cached = None if event.cached_tokens is None else max(event.cached_tokens, 0)
        self._in_flight.finish(self._in_flight.get(own), max(event.output_tokens, 0), cached, now)
        return True

    def forget_peer(self, peer: PeerId, now: float) -> int:
        """Another gateway is gone: its requests in flight no longer count. Returns how many there were."""
        forgotten = self._assumed.forget(peer)
        for own in forgotten:
            entry = self._in_flight.get(own)
            self._in_flight.finish(entry, 0, None, now)
        for listener in self._listeners:
            listener.peer_forgotten(peer, now)
        return len(forgotten)

    # -- what replicas report -----------------------------------------------------------------------------------------

    def on_stored(self, event: BlocksStored, now: float) -> bool:
        """A replica has cached further blocks. Returns False if their parent block is unknown, so they are not indexed.

        Events of an unknown replica are ignored.
        """
        located = True
        if event.replica_id in self._replicas and event.block_hashes:
            replica = self._replicas.replica(event.replica_id)
            model = self._replicas.specs[replica].model
            scoped = replace(event, namespace=_namespace(model, event.namespace)) if model else event
            located = self._tracker.stored(replica, scoped, now)
        for listener in self._listeners:
            listener.stored(event, located, now)
        return located

    def on_evicted(self, event: CacheChange, now: float) -> None:
        """Blocks are gone or elsewhere now, a replica's whole cache is gone, or its events no longer arrive."""
        if event.replica_id in self._replicas:
            replica = self._replicas.replica(event.replica_id)
            if isinstance(event, CacheCleared):
                self._tracker.cleared(replica, now, is_past=event.is_past, engine_only=event.engine_only)
            elif isinstance(event, EventsLost):
                self._tracker.events_lost(replica, now)
            elif isinstance(event, BlocksDemoted):
                self._tracker.demoted(replica, event, now)
            elif isinstance(event, BlocksShared):
                self._tracker.shared(replica, event, now)
            else:
                self._tracker.evicted(replica, event, now)
        for listener in self._listeners:
            listener.evicted(event, now)

    # -- replicas -----------------------------------------------------------------------------------------------------

    def add_replica(self, spec: ReplicaSpec, now: float) -> None:
        """A replica with an empty cache joins. Raises: ValueError: there is one of that name already."""
        if spec.replica_id in self._replicas:
            raise ValueError(f"there is a replica {spec.replica_id!r} already")
        self._tracker.add_replica(self._cluster.add_replica(spec), now)
        for listener in self._listeners:
            listener.replica_added(spec, now)

    def remove_replica(self, replica_id: ReplicaId, now: float) -> list[Request]:
        """A replica left or died: forget it. Returns our requests there, now out of flight: they may be placed again.

        Raises: NoReplicaError: there is no replica of that name.
        """
        if replica_id not in self._replicas:
            raise NoReplicaError(f"there is no replica {replica_id!r} to remove")
        replica = self._replicas.replica(replica_id)
        orphans = self._in_flight.remove_replica(replica)
        self._tracker.remove_replica(replica)
        self._cluster.remove_replica(replica)
        for listener in self._listeners:
            listener.replica_removed(replica_id, now)
        return orphans

    def set_trust(self, replica_id: ReplicaId, trusted: bool, now: float) -> None:
        """Let the cache entries of a replica count, or not. They count when a replica joins.

        On a replica that is not trusted every match counts as 0 tokens, for decisions and for the load they add. The
        index still follows the replica and compares with its reports, so that trust can return at any time.
        Raises: NoReplicaError: there is no replica of that name.
        """
        if replica_id not in self._replicas:
            raise NoReplicaError(f"there is no replica {replica_id!r} to trust or not")
        self._replicas.set_trust(self._replicas.replica(replica_id), trusted)
        for listener in self._listeners:
            listener.trust_changed(replica_id, trusted, now)

    # -- time ---------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """When `on_timer` has something to do next; None if nothing is pending."""
        earliest = self._tracker.next_timer()
        corrected_at = self._refit.due_at if self._refit is not None else None
        for due in (self._cluster.window.next_expiry(), self._cluster.rebalancer.next_search(), corrected_at):
            if due is not None and due < earliest:
                earliest = due
        return None if earliest == inf else earliest

    def on_timer(self, now: float) -> list[PrefixReplication]:
        """Do what is due: expire the window, pending reports and old estimates; rebalance; correct the cost model.

        Returns the prefixes that were replicated or retired. The caller only reports them.
        """
        self._expire(now)
        changes = self._rebalance(now)
        self._tracker.expire_old(now)
        corrected = self._refit.refit(now) if self._refit is not None else None
        if corrected is not None:
            self._cluster.use(corrected)
        for listener in self._listeners:
            listener.timer_ran(now)
        return changes

    def _rebalance(self, now: float) -> list[PrefixReplication]:
        search_at = self._cluster.rebalancer.next_search()
        if search_at is None or search_at > now:
            return []
        return [
            PrefixReplication(
                self._replicas.replica_id(change.replica), change.node.end, change.added, change.num_replicas
            )
            for change in self._cluster.rebalancer.search(self._cluster, now)
        ]

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def cost_model(self) -> CostModel:
        """The cost model, as corrected so far."""
        return self._cluster.cost_model

    def _enough_index_bytes(self) -> int:
        """What the index takes about, where the KV capacity of the replicas is known."""
        bytes_of = [
            (spec.kv_capacity_tokens or 0) * (_INDEX_BYTES_PER_TOKEN + NAME_BYTES / spec.block_size)
            for spec in self._replicas.specs.values()
        ]
        return int(sum(bytes_of))

    def snapshot(self) -> SchedulerState:
        """The scheduler's state now, as one value. O(replicas)."""
        return SchedulerState(
            num_in_flight=len(self._in_flight) - self._in_flight.num_assumed,
            num_assumed=self._in_flight.num_assumed,
            num_index_tokens=self._cluster.index.tree.num_tokens,
            num_index_bytes=self._cluster.index.num_bytes,
            index_budget_bytes=self._index_budget_bytes,
            enough_index_bytes=self._enough_index_bytes(),
            num_unindexed=self._tracker.num_unindexed,
            num_replicated_prefixes=self._cluster.rebalancer.num_replicated,
            cost_factors=self._refit.factors if self._refit is not None else CostFactors(),
            window_s=self._cluster.window.window_s,
            replicas={
                self._replicas.replica_id(replica): self._replica(replica) for replica in self._replicas.live_replicas
            },
        )

    def hottest(self, at_most: int) -> list[HotPrefix]:
        """Return the prefixes that most requests of the window use, each after its parent. O(prompts indexed)."""
        found: list[HotPrefix] = []
        for shared in hottest(self._cluster.index.tree, at_most):
            node = shared.node
            above = found[shared.parent].name if shared.parent is not None else shared.namespace
            name = blake2b(above.encode() + node.tokens[:_NAMED_BYTES], digest_size=6).hexdigest()
            whole, ids = node.full_holders, self._replicas.ids
            holders = tuple(r for i in replicas_in(whole) if (r := ids[i]) is not None)
            partly = tuple(r for i in replicas_in(node.holders & ~whole) if (r := ids[i]) is not None)
            found.append(HotPrefix(name, shared.parent, node.start, node.end, node.recent_uses, holders, partly))
        return found

    def matched_tokens(self, replica_id: ReplicaId, request: Request) -> int:
        """Leading tokens of a prompt that a replica, trusted or not, is expected to serve from its cache now.

        Changes nothing. Raises: KeyError: there is no replica of that name.
        """
        replica = self._replicas.replica(replica_id)
        match = self._match(request, request.model or self._replicas.specs[replica].model)
        return self._tracker.usable_tokens(replica, request, match)

    def check(self) -> None:
        """Every invariant. O(everything); for tests."""
        self._cluster.index.check()
        self._cluster.window.check()
        self._in_flight.check()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _replica(self, replica: ReplicaIndex) -> ReplicaState:
        return ReplicaState(
            num_requests=self._replicas.num_requests[replica],
            waiting_prefill_tokens=self._replicas.waiting_prefill_tokens[replica],
            waiting_prefill_s=self._replicas.waiting_prefill_s[replica],
            load_s=self._cluster.window.load_s[replica],
            cached_tokens=self._cluster.index.caches[replica].used_tokens,
            in_use_tokens=self._cluster.index.caches[replica].in_use_tokens,
            kv_capacity_tokens=self._replicas.specs[replica].kv_capacity_tokens,
            drift=replace(self._tracker.drift(replica)),
            trusted=self._replicas.trusts(replica),
        )

    def _eligible(self, request: Request) -> ReplicaSet:
        if not self._replicas.live:
            raise NoReplicaError("no replica is available")
        serving = self._replicas.serving(request.model)
        if not serving:
            raise NoReplicaError(f"no replica that serves the model {request.model!r} is available")
        fitting = serving & self._replicas.fitting(request.num_prompt_tokens)
        if not fitting:
            raise PromptTooLong(
                f"the prompt has {request.num_prompt_tokens} tokens; "
                f"the longest that a replica takes is {self._replicas.longest_prompt(serving)}"
            )
        eligible = fitting & ~self._replicas.mask(request.avoid)
        if not eligible:
            raise NoReplicaError("no other replica is available")
        return eligible

    def _match(self, request: Request, model: str) -> Match:
        return self._cluster.index.match(request.prompt, _namespace(model, request.namespace))

    def _expire(self, now: float) -> None:
        for replica, leaf in self._cluster.window.expire(now):
            self._cluster.index.forget_use(replica, leaf)
        self._tracker.expire_pending_reports(now)
        self._cluster.speeds.update(now, self._replicas.waiting_prefill_s)


def _namespace(model: str, namespace: str) -> str:
    """Prompts of different base models share no KV, whatever namespace the client or the engine gives."""
    return f"{model}\x1e{namespace}" if model else namespace
