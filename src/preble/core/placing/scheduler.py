"""The global scheduler: the one interface of the global half.

Source: Preble, "E2 Global Scheduler".
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from random import Random

from preble.core.cluster.replicas import NO_PREFILL
from preble.core.cluster.state import ClusterState
from preble.core.costs.model import CostModel
from preble.core.costs.refit import CostFactors, CostRefit, RefitSettings
from preble.core.placing.assumed import AssumedRequests
from preble.core.placing.cache_tracker import CacheTracker
from preble.core.placing.in_flight import InFlightTable
from preble.core.placing.promises import Forecast, Promises
from preble.core.placing.snapshot import HotPrefix, SchedulerState, hot_prefixes, take_snapshot
from preble.core.placing.timing_samples import TimingSamples
from preble.core.policies.pairs import Pairs, delay_s, pools
from preble.core.policies.policy import Policy, Watching, failure_of, ttft_value
from preble.core.policies.view import Choice, ClusterView
from preble.core.prefixes.learned_lengths import learned_lengths
from preble.core.prefixes.radix_tree import Match, expected_output_tokens, scoped_namespace
from preble.core.replica_index import ReplicaIndex, ReplicaSet
from preble.core.types import (
    NOTHING_LEARNED,
    BlocksDemoted,
    BlocksShared,
    BlocksStored,
    CacheChange,
    CacheCleared,
    EventsLost,
    Learned,
    PeerId,
    Placement,
    PrefixReplication,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Transfer,
    TransferKind,
)
from preble.core.types.events import (
    NotPlaced,
    PeerEvent,
    PeerForgotten,
    ReplicaAdded,
    ReplicaRemoved,
    Reported,
    RequestPlaced,
    SchedulerEvent,
    SchedulerListener,
    Stored,
    TimerEvent,
    TransfersAllowed,
    TrustChanged,
)
from preble.core.types.life import FIRST_TOKEN, TRANSFER_FAILED, TRANSFERRED, Ended, Moved, TransferFailed
from preble.errors import NoReplicaError, PolicyError, PrebleError, PromptTooLong, UnknownRequest


class GlobalScheduler:
    """Places every request of a cluster. Synchronous, single-threaded; time comes in as `now`, in seconds.

    `now` must not go back. `seed`: of the generator that breaks ties. `window_s`: H, the time over which load and
    popularity are counted. `report_grace_s`: how long after a request's end a replica may still report what the request
    stored. `belief_ttl_s`: how long an unused prefix counts as cached on a replica that reports no evictions.
    `index_budget_bytes`: the most memory that the prefix index may take, None for no limit. At the limit the index
    forgets what was used least recently. If that is not enough, it takes in no new prefixes
    (`SchedulerState.num_unindexed` counts them), and such requests are placed by load. `refit`: how to correct the cost
    model from live requests, None for not at all. `learned`: by another scheduler, with the same cost model
    (`GlobalScheduler.learned`).
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
        refit: RefitSettings | None = None,
        learned: Learned = NOTHING_LEARNED,
    ) -> None:
        self.policy = policy
        self._index_budget_bytes = index_budget_bytes
        self._listeners: list[SchedulerListener] = []
        self._rng = Random(seed)
        self._refit = None
        if refit is not None:
            factors = CostFactors(learned.prefill_factor, learned.decode_factor)
            self._refit = CostRefit(cost_model.profile, refit, factors)
            cost_model = self._refit.model
        self._cluster = ClusterState(cost_model, window_s, learned)
        self._replicas = self._cluster.replicas
        self._tree = self._cluster.index.tree
        self._tracker = CacheTracker(
            self._cluster,
            report_grace_s=report_grace_s,
            belief_ttl_s=belief_ttl_s,
            index_budget_bytes=index_budget_bytes,
        )
        timing = TimingSamples(self._cluster, self._refit)
        self._promises = Promises()
        self._in_flight = InFlightTable(self._cluster, self._tracker, timing, self._promises)
        self._assumed = AssumedRequests(self._cluster, self._tracker, self._in_flight)
        self._watching = policy if isinstance(policy, Watching) else None
        if self._watching is not None:
            self._watching.watch(self._cluster)
            self.listen(self._watching)

    def __repr__(self) -> str:
        num_replicas, num_in_flight = self._replicas.serving("").bit_count(), len(self._in_flight)
        return f"<GlobalScheduler {self.policy.name!r}: {num_replicas} replicas, {num_in_flight} requests in flight>"

    def listen(self, listener: SchedulerListener) -> None:
        """Report each later call that changes the scheduler to `listener`."""
        self._listeners.append(listener)

    def _tell(self, event: SchedulerEvent, now: float) -> None:
        for listener in self._listeners:
            listener.on(event, now)

    # -- requests -----------------------------------------------------------------------------------------------------

    def place(self, request: Request, now: float) -> Placement:
        """Choose a replica and commit to it: the request is in flight there until `on_finish`.

        O(prompt tokens at memcmp speed + what the policy weighs).
        Raises: NoReplicaError: there is no replica, or the request must avoid each of them. PromptTooLong: no replica
        can hold it. UnknownRequest: a request of this id is in flight already. PolicyError: the policy chose a
        replica that is no candidate, or, if it is not one of Preble's own, failed.
        """
        if request.request_id in self._in_flight.entries:
            raise UnknownRequest(f"request {request.request_id!r} is in flight already")
        try:
            placement = self._place(request, now)
        except (NoReplicaError, PromptTooLong) as error:
            self._tell(NotPlaced(request, error), now)
            raise
        if self._listeners:
            self._tell(RequestPlaced(request, placement), now)
        return placement

    def _place(self, request: Request, now: float) -> Placement:
        self._tracker.expire(now)
        eligible = self._replicas.eligible(request)
        match = self._tree.match(request.prompt, request.namespace, request.model)
        if eligible & self._replicas.decoding:
            return self._place_among_roles(request, eligible, match, now)
        view = ClusterView(request, eligible, match, self._cluster, now)
        if request.has_target and (keeping := self._promises.keeping(view)) != eligible:
            eligible = keeping
            view = ClusterView(request, eligible, match, self._cluster, now)
        choice = self._chosen(view)
        return self._commit(view, choice, choice.replica)

    def _place_among_roles(self, request: Request, eligible: ReplicaSet, match: Match, now: float) -> Placement:
        """Place a request where some replicas only decode: on the cheapest pair, or a mixed replica if that is cheaper.

        Where there is neither, or the request cannot be split, one that decodes computes the prompt, too, if it can.
        Targets for its times do not limit the choice.
        """
        best: tuple[float, ClusterView, Choice] | None = None
        value = ttft_value(self.policy)
        alone = eligible & self._replicas.answering_alone
        if whole := alone & ~self._replicas.decoding if request.splits else alone:
            view = ClusterView(request, whole, match, self._cluster, now)
            choice = self._chosen(view)
            best = delay_s(view, choice, value), view, choice
        for sources, targets in pools(request, eligible, self._cluster) if request.splits or not alone else ():
            view = ClusterView(request, sources, match, self._cluster, now)
            source = self._chosen(view)
            view_of_targets = ClusterView(request, targets, match, self._cluster, now)
            choice = Pairs(view, source, view_of_targets, value).best()
            cost_s = delay_s(view_of_targets, choice, value)
            if best is None or cost_s < best[0]:
                best = cost_s, view_of_targets, choice
        if best is None:
            if not alone:
                raise NoReplicaError(NO_PREFILL)
            view = ClusterView(request, alone, match, self._cluster, now)
            best = 0.0, view, self._chosen(view)
        return self._commit(best[1], best[2], best[2].replica)

    def _chosen(self, view: ClusterView) -> Choice:
        """Return the policy's choice. Raises: PolicyError: it is none of the view's replicas."""
        try:
            choice = self.policy.choose(view, self._rng)
        except Exception as error:
            if isinstance(error, PrebleError) or type(self.policy).__module__.startswith("preble."):
                raise
            raise failure_of(self.policy, error) from error
        if not isinstance(choice, Choice):
            remedy = "return Choice(replica.index, Reason.POLICY)"
            raise PolicyError(f"policy {self.policy.name!r} returned {choice!r}; {remedy}")
        if choice.replica < 0 or not view.eligible >> choice.replica & 1:
            raise PolicyError(
                f"policy {self.policy.name!r} chose replica index {choice.replica}, which is none of {view.replicas}"
            )
        return choice

    def _commit(self, view: ClusterView, choice: Choice, replica: ReplicaIndex) -> Placement:
        request, copy, transfer = view.request, choice.copy, None
        if copy is None:
            cached = matched = view.matched_on(replica)
            prefill_s = view.own_prefill_s(replica)
            ttft_s = view.ttft_s(replica, prefill_s)
        else:
            matched = copy.matched_tokens
            cached = copy.source_tokens if copy.is_split else matched
            prefill_s = view.prefill_s(matched)
            waiting_s = max(view.waiting_prefill_s[replica], copy.seconds)
            ttft_s = waiting_s + prefill_s * view.slowness(replica)
            kind = TransferKind.PREFILL if copy.is_split else TransferKind.COPY
            transfer = Transfer(self._replicas.replica_id(copy.source), copy.tokens, copy.seconds, kind)
        tpot_s = view.tpot_s(replica)
        output_tokens = view.expected_output_tokens
        entry = self._in_flight.start(
            request, replica, matched, prefill_s, view.match, view.now, output_tokens=output_tokens, copy=copy
        )
        entry.predicted_ttft_s, entry.predicted_tpot_s = ttft_s, tpot_s
        if request.tpot_s < inf:
            self._promises.placed(entry)
        ttft, tpot = self._promises.ttft, self._promises.tpot
        return Placement(
            request.request_id,
            self._replicas.replica_id(replica),
            choice.reason,
            cached,
            request.num_prompt_tokens,
            choice.candidates,
            self._replicas.untrusted_ids,
            ttft_s,
            transfer,
            predicted_ttft_p98_s=max(ttft_s + ttft.excess_s, 0.0) if ttft.are_enough else None,
            predicted_tpot_s=tpot_s,
            predicted_tpot_p98_s=max(tpot_s + tpot.excess_s, 0.0) if tpot.are_enough else None,
        )

    def forecast(self, request: Request, now: float) -> Forecast:
        """Return what a request that comes now can nearly always have at best. Changes nothing.

        Where roles are fixed, the first token takes as long as its prompt on one that computes prompts. O(prompt tokens
        at memcmp speed + replicas). Raises: NoReplicaError, PromptTooLong: as `place`.
        """
        eligible = self._replicas.eligible(request)
        if decoding := eligible & self._replicas.decoding:
            eligible = self._replicas.sources(request) | eligible & ~decoding or eligible
        match = self._tree.match(request.prompt, request.namespace, request.model)
        return self._promises.forecast(ClusterView(request, eligible, match, self._cluster, now))

    def move(self, request_id: RequestId, to: ReplicaId, now: float) -> None:
        """The driver sent a request to another replica than it was placed on: its load and its prefix move there.

        Raises: UnknownRequest: it is not in flight. NoReplicaError: there is no replica of that name.
        """
        if to not in self._replicas:
            raise NoReplicaError(f"cannot move request {request_id!r}: there is no replica {to!r}")
        entry = self._in_flight.entries[request_id]
        self._in_flight.withdraw(entry, now)
        request, replica = entry.request, self._replicas.replica(to)
        match = self._tree.match(request.prompt, request.namespace, request.model)
        matched = self._tracker.trusted_tokens(replica, request, match)
        prefill_s = self._cluster.cost_model.prefill_s(request.num_prompt_tokens - matched, matched)
        expected = expected_output_tokens(match.path, self._cluster.window.mean_answer_tokens)
        self._in_flight.start(request, replica, matched, prefill_s, match, now, output_tokens=expected)
        self._tell(Reported(request_id, Moved(to)), now)

    def on_transferred(self, request_id: RequestId, now: float) -> None:
        """The placement's transfer is complete. Changes nothing for a request that waits for none.

        Raises: UnknownRequest: the request is not in flight.
        """
        self._in_flight.transferred(self._in_flight.entries[request_id], now)
        self._tell(Reported(request_id, TRANSFERRED), now)

    def on_transfer_failed(self, request_id: RequestId, now: float, *, kept_s: float = 0.0) -> None:
        """The placement's transfer has failed, so its replica computes all that it lacks. Else as `on_transferred`.

        `kept_s`: for so long the source has no other use for its memory: it has computed the prompt, and nobody has
        fetched it.
        """
        self._in_flight.transfer_failed(self._in_flight.entries[request_id], now, kept_s)
        self._tell(Reported(request_id, TransferFailed(kept_s=kept_s) if kept_s else TRANSFER_FAILED), now)

    def on_first_token(self, request_id: RequestId, now: float) -> None:
        """The first output token has arrived, so the prompt is computed. Further calls change nothing.

        Raises: UnknownRequest: the request is not in flight.
        """
        self._in_flight.first_token(self._in_flight.entries[request_id], now)
        if self._listeners:
            self._tell(Reported(request_id, FIRST_TOKEN), now)

    def on_finish(
        self, request_id: RequestId, output_tokens: int, now: float, *, cached_tokens: int | None = None
    ) -> None:
        """The request is over, whether finished, aborted or failed. Call it exactly once for each placed request.

        `output_tokens`: their number; 0 without a first token means that the work was not done. `cached_tokens`: the
        prompt tokens that the replica reports as cached, None if it does not report them.
        Raises: UnknownRequest: it is not in flight.
        """
        self._in_flight.finish(self._in_flight.entries[request_id], output_tokens, cached_tokens, now)
        if self._listeners:
            self._tell(Reported(request_id, Ended(output_tokens=output_tokens, cached_tokens=cached_tokens)), now)

    # -- what other gateways report -----------------------------------------------------------------------------------

    def assume(self, event: PeerEvent, now: float) -> bool:
        """Take another gateway's report: it placed a request, saw its first token or end, or had a prompt computed.

        Until its end, the request counts here like our own: its load, and its prompt as about to be cached. Events may
        come twice, in any order, or not at all. Returns whether the event changed anything: we ignore one of an unknown
        request or replica, and one that makes no sense.
        """
        changed = self._assumed.assume(event, now)
        self._tell(event, now)
        return changed

    def forget_peer(self, peer: PeerId, now: float) -> int:
        """Forget a gateway that is gone: its requests in flight no longer count. Return how many there were."""
        num_forgotten = self._assumed.forget(peer, now)
        self._tell(PeerForgotten(peer), now)
        return num_forgotten

    # -- what replicas report -----------------------------------------------------------------------------------------

    def on_stored(self, event: BlocksStored, now: float) -> bool:
        """Take in further blocks that a replica has cached. Return False if their parent block is unknown, so they are
        not indexed.

        Events of an unknown replica are ignored.
        """
        located = True
        if event.replica_id in self._replicas and event.tokens:
            replica = self._replicas.replica(event.replica_id)
            model = self._replicas.specs[replica].model
            located = self._tracker.stored(replica, event, scoped_namespace(model, event.namespace), now)
        self._tell(Stored(event, located), now)
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
        self._tell(event, now)

    # -- replicas -----------------------------------------------------------------------------------------------------

    def add_replica(self, spec: ReplicaSpec, now: float) -> None:
        """A replica with an empty cache joins. Raises: ValueError: there is one of that name already."""
        if spec.replica_id in self._replicas:
            raise ValueError(f"there is a replica {spec.replica_id!r} already")
        self._tracker.add_replica(self._cluster.add_replica(spec), now)
        self._tell(ReplicaAdded(spec), now)

    def remove_replica(self, replica_id: ReplicaId, now: float) -> list[Request]:
        """Forget a replica that left or died. Return our requests there, now out of flight: they may be placed again.

        Raises: NoReplicaError: there is no replica of that name.
        """
        if replica_id not in self._replicas:
            raise NoReplicaError(f"there is no replica {replica_id!r} to remove")
        replica = self._replicas.replica(replica_id)
        orphans = self._in_flight.remove_replica(replica, now)
        self._tracker.remove_replica(replica)
        self._cluster.remove_replica(replica)
        self._tell(ReplicaRemoved(replica_id), now)
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
        self._tell(TrustChanged(replica_id, trusted), now)

    def allow_transfers(self, replica_id: ReplicaId, allowed: bool, now: float) -> None:
        """Let a replica of a transfer group take part in new transfers, or not. It does when it joins.

        Raises: NoReplicaError: there is no replica of that name.
        """
        if replica_id not in self._replicas:
            raise NoReplicaError(f"there is no replica {replica_id!r} whose transfers could be allowed or not")
        replica = self._replicas.replica(replica_id)
        if group := self._replicas.specs[replica].transfer_group:
            self._cluster.links.allow(replica, group, allowed=allowed)
        self._tell(TransfersAllowed(replica_id, allowed), now)

    # -- time ---------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """Return when `on_timer` has something to do next; None if nothing is pending."""
        earliest = min(self._tracker.next_timer, self._cluster.window.next_expiry)
        if self._watching is not None and (watched_at := self._watching.next_timer()) is not None:
            earliest = min(earliest, watched_at)
        corrected_at = self._refit.due_at if self._refit is not None else None
        if corrected_at is not None:
            earliest = min(earliest, corrected_at)
        return None if earliest == inf else earliest

    def on_timer(self, now: float) -> list[PrefixReplication]:
        """Do what is due: expire the window, pending reports and old estimates; correct the cost model; the policy's.

        Returns the prefixes that were replicated or retired. The caller only reports them.
        """
        self._tracker.expire(now)
        changes = self._watching.on_timer(now) if self._watching is not None else []
        self._tracker.expire_old(now)
        corrected = self._refit.refit(now) if self._refit is not None else None
        if corrected is not None:
            self._cluster.use(corrected)
        self._tell(TimerEvent(), now)
        return changes

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def cost_model(self) -> CostModel:
        """The cost model, as corrected so far."""
        return self._cluster.cost_model

    @property
    def num_unindexed(self) -> int:
        """Prompts and reports so far that the index budget had no room for."""
        return self._tracker.num_unindexed

    def snapshot(self) -> SchedulerState:
        """Return the scheduler's state now, as one value. O(replicas)."""
        return take_snapshot(
            self._cluster,
            self._tracker,
            self._in_flight,
            self._refit,
            index_budget_bytes=self._index_budget_bytes,
            num_replicated=self._watching.num_replicated if self._watching is not None else 0,
        )

    def learned(self) -> Learned:
        """Return what was learned so far, for another scheduler to begin with.

        O(tokens of the prefixes that are often asked for), some ten milliseconds at most.
        """
        factors = self._refit.factors if self._refit is not None else CostFactors()
        answer_tokens = self._cluster.window.mean_answer_tokens
        lengths = learned_lengths(self._tree)
        return Learned(factors.prefill, factors.decode, answer_tokens, tuple(lengths))

    def hottest(self, at_most: int, placed: Mapping[float, RequestId] | None = None) -> list[HotPrefix]:
        """Return the prefixes that most requests of the window use, each after its parent.

        `placed`: requests to name them by, by the time of their placement.
        O(prompts indexed + requests in the window + `placed` x depth).
        """
        return hot_prefixes(self._cluster, at_most, placed or {})

    def matched_tokens(self, replica_id: ReplicaId, request: Request) -> int:
        """Return leading tokens of a prompt that a replica, trusted or not, is expected to serve from its cache now.

        Changes nothing. Raises: KeyError: there is no replica of that name.
        """
        replica = self._replicas.replica(replica_id)
        model = request.model or self._replicas.specs[replica].model
        match = self._tree.match(request.prompt, request.namespace, model)
        return self._tracker.usable_tokens(replica, request, match)

    def check(self) -> None:
        """Assert every invariant. O(everything); for tests."""
        self._cluster.index.check()
        self._cluster.window.check()
        self._in_flight.check()
