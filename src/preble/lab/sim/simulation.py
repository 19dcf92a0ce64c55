"""A cluster on a virtual clock: the schedulers that serve, with time from an agenda.

It treats a request as the gateway does: a replica that is lost before a request's first token costs it one more
placement; after the first token, or the second time, the request fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial

from preble.core.admission.admission import FairAdmission
from preble.core.admission.fair_queue import QueueSettings, TurnRefused
from preble.core.costs.model import CostModel
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.policy import Policy
from preble.core.replica.scheduler import StepResult
from preble.core.replica.sequence import Finished
from preble.core.types import (
    NO_TARGET,
    BlocksStored,
    KvEvent,
    Placement,
    ReplicaId,
    Request,
    RequestId,
    Target,
)
from preble.decisions.writer import DecisionRecorder, LogWriter
from preble.errors import ConfigError, NoReplicaError, PromptTooLong, RequestError
from preble.lab.metrics import RequestRecord, summarize
from preble.lab.metrics.itl import GapCounts
from preble.lab.sim.agenda import Agenda, Priority
from preble.lab.sim.calls import NO_REPLICA, PARENT_FAILED, PROMPT_TOO_LONG, REFUSED, REPLICA_LOST, Call
from preble.lab.sim.config import Failure, FailureKind, SimConfig
from preble.lab.sim.fleet import SimFleet
from preble.lab.sim.gateways import ClusterScheduler, make_cluster_scheduler
from preble.lab.sim.replica import SimReplica
from preble.lab.sim.result import SimResult, totals_by_name
from preble.lab.sim.script import Script
from preble.lab.sim.timeline import ReplicaSeries
from preble.lab.sim.timers import Timers
from preble.lab.sim.transfers import Transfers
from preble.lab.sim.watch import Glimpse, Watch
from preble.lab.workloads import Workload, WorkloadRequest


@dataclass(eq=False)
class Simulation:
    """One run of a workload; use it once.

    `workload`: its openers have arrival times. `scheduler`: without replicas yet; made as configured unless given, as
    one that records or has a policy of its own. `on_record` is given each request's record when it ends. `on_placement`
    is given each placement and its time. `watch` may end the run early. `admission`: the gateway's queue, in which
    requests of the tenants that `tenant_of` names wait before they are placed; None: they are placed when they come.
    `target_of`: what a request asks for; one that no replica can give it is refused.
    """

    config: SimConfig
    workload: Workload
    _: KW_ONLY
    scheduler: ClusterScheduler | None = None
    on_record: Callable[[RequestRecord], None] = lambda record: None
    on_placement: Callable[[Placement, float], None] = lambda placement, now: None
    watch: Watch | None = None
    admission: FairAdmission | None = None
    tenant_of: Callable[[WorkloadRequest], str] = lambda asked: ""
    target_of: Callable[[WorkloadRequest], Target] = lambda asked: NO_TARGET

    def __post_init__(self) -> None:
        self._script = Script(self.workload)
        self._cost_model = CostModel(self.config.true_profile)
        self._scheduler = self.scheduler or make_cluster_scheduler(self.config)
        self._timers = Timers(self._scheduler)
        self._agenda = Agenda()
        self._fleet = SimFleet(self._agenda, self._after_iteration)
        self._transfers = Transfers(self._fleet, self._agenda, self._cost_model, self._transferred, self._lost_source)
        self._drained: frozenset[ReplicaId] = frozenset()
        self._calls: dict[RequestId, Call] = {}
        self._records: list[RequestRecord] = []
        self._reasons: Counter[str] = Counter()
        self._timeline: dict[str, ReplicaSeries] = {}
        self._num_expected = len(self.workload.requests)
        self._stopped_s: float | None = None

    def run(self) -> SimResult:
        """Play the workload to its end, or to the end of what was sent before `watch` had seen enough."""
        self._set_out()
        now = 0.0
        while len(self._records) < self._num_expected:
            time_s, event = self._agenda.pop()
            if time_s > now:
                self._timers.run(time_s)
                now = time_s
            event(now)
        return SimResult(
            workload=self.workload.name,
            workload_note=self.workload.note,
            config=self.config,
            policy=self._scheduler.policy.name,
            summary=summarize(self._records),
            gpu_s=sum(replica.busy_s for replica in self._fleet.all),
            reasons=dict(sorted(self._reasons.items())),
            replicas=totals_by_name(self._fleet.all),
            replications=self._timers.replications,
            timeline=self._timeline,
            stopped_s=self._stopped_s,
            records=self._records,
        )

    def check(self) -> None:
        """Assert every invariant of the schedulers, and that nothing is left once every request has ended."""
        self._scheduler.check()
        for replica in self._fleet.live.values():
            replica.local.check()
        if len(self._records) == len(self.workload.requests):
            assert not self._calls and not self._scheduler.snapshot().num_in_flight
            assert not any(
                replica.local.num_running or replica.local.num_waiting for replica in self._fleet.live.values()
            )

    def _set_out(self) -> None:
        for replica_id in self.config.initial_replicas:
            self._add_replica(replica_id, 0.0)
        for failure in self.config.failures:
            self._agenda.at(failure.time_s, Priority.FLEET, partial(self._fail, failure))
        for request in self.workload.openers:
            self._agenda.at(request.arrival_s or 0.0, Priority.ARRIVAL, partial(self._send, request))
        if self.config.sample_s is not None:
            self._agenda.at(0.0, Priority.SAMPLE, self._sample)
        if self.watch is not None:
            self._agenda.at(self.watch.every_s, Priority.SAMPLE, self._look)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _send(self, asked: WorkloadRequest, now: float) -> None:
        if self._stopped_s is not None and asked.parent is None:
            return
        request = Request(RequestId(asked.request_id), self._script.take_prompt(asked), asked.output_tokens)
        answer = self._script.answer(asked, request.prompt)
        call = self._calls[request.request_id] = Call(asked, request, answer, now)
        request.promise(self.target_of(asked), now)
        self._offer(call, now)

    def _offer(self, call: Call, now: float) -> None:
        """Refuse a request whose target cannot be kept; else let it wait for its turn, or place it."""
        request, start_by = call.request, None
        if request.has_target:
            forecast = self._scheduler.forecast(self._held_back(request), now)
            if forecast.refused_for_s(request, now) > 0.0:
                self._end(call, now, error=REFUSED)
                return
            if forecast.is_possible(request, now):
                start_by = forecast.start_by(request)
        if self.admission is None:
            self._place(call, now)
            return
        tenant, num_tokens = self.tenant_of(call.asked), request.num_prompt_tokens
        self.admission.use(self._scheduler.cost_model)
        self._refuse(self.admission.offer(request.request_id, tenant, num_tokens, now, start_by=start_by), now)
        self._place_next(now)

    def _place_next(self, now: float) -> None:
        """Place what the queue lets go, now that something has changed."""
        if self.admission is None:
            return
        self._refuse(self.admission.expire(now), now)
        while (request_id := self.admission.next(now)) is not None:
            self._place(self._calls[request_id], now)

    def _refuse(self, refused: list[TurnRefused], now: float) -> None:
        for refusal in refused:
            self._end(self._calls[refusal.request_id], now, error=REFUSED)

    def _place(self, call: Call, now: float) -> None:
        try:
            placement = self._timers.scheduler.place(self._held_back(call.request), now)
        except NoReplicaError:
            self._end(call, now, error=NO_REPLICA)
            return
        except PromptTooLong:
            self._end(call, now, error=PROMPT_TOO_LONG)
            return
        if self.admission is not None:
            self.admission.placed(placement, self.tenant_of(call.asked), now)
        self.on_placement(placement, now)
        self._reasons[placement.reason] += 1
        call.placement = placement
        call.replica = self._fleet.live[placement.replica_id]
        deliver = partial(self._deliver, call, call.replica)
        if placement.transfer is not None:
            start = partial(self._transfers.start, call, placement)
            self._agenda.at(now + self.config.dispatch_s, Priority.ARRIVAL, start)
        elif self.config.dispatch_s:
            self._agenda.at(now + self.config.dispatch_s, Priority.ARRIVAL, deliver)
        else:
            deliver(now)

    def _held_back(self, request: Request) -> Request:
        """Return the request as the scheduler gets it, which places it on no drained replica."""
        return replace(request, avoid=self._drained) if self._drained else request

    def _transferred(self, call: Call, has_come: bool, now: float) -> None:
        """A transfer is there, or has failed: deliver its request."""
        assert call.replica is not None
        self._tell(call.replica, partial(self._tell_transferred, call.request.request_id, has_come), now)
        self._deliver(call, call.replica, now)

    def _lost_source(self, call: Call, now: float) -> None:
        """Place a request anew whose prompt cannot come: its replica only decodes."""
        self._timers.scheduler.on_finish(call.request.request_id, 0, now)
        call.delivered = True  # to a pair, which counts as one attempt
        self._rescue(call, now)

    def _deliver(self, call: Call, replica: SimReplica, now: float) -> None:
        """Deliver a request to its replica, unless that was lost meanwhile and the request placed again."""
        if call.replica is not replica:
            return
        try:
            replica.local.add(call.request, call.answer, now)
        except RequestError:
            self._timers.scheduler.on_finish(call.request.request_id, 0, now)
            self._end(call, now, error=PROMPT_TOO_LONG)
            return
        call.delivered = True
        self._fleet.wake(replica, now)

    def _finish(self, replica: SimReplica, finished: Finished, now: float) -> None:
        cached_tokens, output_tokens = finished.num_cached_tokens, finished.num_output_tokens

        def tell(at_s: float) -> None:
            self._timers.scheduler.on_finish(finished.request_id, output_tokens, at_s, cached_tokens=cached_tokens)

        self._tell(replica, tell, now)
        gaps = replica.gaps.take(finished.request_id)
        call = self._calls[finished.request_id]
        if call.leg_cached is not None:  # what was computed for it elsewhere was not cached
            cached_tokens = call.leg_cached
        self._end(call, now, output_tokens=output_tokens, cached_tokens=cached_tokens, gaps=gaps)

    def _tell(self, replica: SimReplica, tell: Callable[[float], None], now: float) -> None:
        """Tell the scheduler what happened on a replica, with the configured delay, if the replica is still there."""
        if not self.config.knowledge_delay_s:
            tell(now)
            return

        def tell_later(at_s: float) -> None:
            if replica.is_alive:
                tell(at_s)

        self._agenda.at(now + self.config.knowledge_delay_s, Priority.REPORT, tell_later)

    def _end(
        self,
        call: Call,
        now: float,
        *,
        error: str | None = None,
        output_tokens: int = 0,
        cached_tokens: int | None = None,
        gaps: GapCounts | None = None,
    ) -> None:
        """Record the request; send those that waited for it, or give them up if it failed."""
        del self._calls[call.request.request_id]
        if self.admission is not None:
            self.admission.ended(call.request.request_id, output_tokens)
            self.admission.withdraw(call.request.request_id)
        placement = call.placement
        self._record(
            RequestRecord(
                request_id=call.asked.request_id,
                scheduled_s=call.scheduled_s,
                sent_s=call.scheduled_s,
                first_token_s=call.first_token_s,
                end_s=now,
                prompt_tokens=call.request.num_prompt_tokens,
                output_tokens=output_tokens,
                cached_tokens=cached_tokens,
                replica=placement.replica_id if placement else None,
                reason=placement.reason if placement else None,
                error=error,
                gaps=gaps or {},
            )
        )
        for child in self._script.followers(call.asked):
            if error is None:
                time_s = max(now + child.delay_s, child.arrival_s or 0.0)
                self._agenda.at(time_s, Priority.ARRIVAL, partial(self._send, child))
            else:
                self._give_up(child, now)

    def _give_up(self, asked: WorkloadRequest, now: float) -> None:
        """Give up a request that cannot be sent, and all that wait for it."""
        unsent = [asked]
        while unsent:
            asked = unsent.pop()
            unsent += self._script.followers(asked)
            self._script.drop(asked)
            self._record(
                RequestRecord(request_id=asked.request_id, scheduled_s=now, sent_s=now, end_s=now, error=PARENT_FAILED)
            )

    def _record(self, record: RequestRecord) -> None:
        self._records.append(record)
        self.on_record(record)

    # -- replicas -----------------------------------------------------------------------------------------------------

    def _add_replica(self, replica_id: ReplicaId, now: float) -> None:
        replica = SimReplica(replica_id, self.config, self._cost_model)
        self._timers.scheduler.add_replica(replica.spec, now)
        if self.admission is not None:
            self.admission.add_replica(replica_id)
        self._fleet.add(replica)

    def _fail(self, failure: Failure, now: float) -> None:
        replica_id = ReplicaId(failure.replica)
        if failure.kind is FailureKind.DRAINED:
            self._drained |= {replica_id}
            return
        self._drained -= {replica_id}
        orphans: list[Request] = []
        if failure.kind is not FailureKind.ADDED:
            self._fleet.lose(replica_id, now)
            orphans = self._timers.scheduler.remove_replica(replica_id, now)
            if self.admission is not None:
                self.admission.remove_replica(replica_id)
        if failure.kind is not FailureKind.LOST:
            self._add_replica(replica_id, now)
        for request in orphans:
            if request.request_id in self._calls:  # else it has ended, and the scheduler does not know yet
                self._rescue(self._calls[request.request_id], now)
        self._transfers.give_up_legs(self._calls.values(), now)

    def _rescue(self, call: Call, now: float) -> None:
        """Place a request of a lost replica once more, if its client has seen nothing of it yet."""
        if call.leg is not None:
            call.leg.local.abort(call.request.request_id)
        call.leg = call.leg_cached = None
        if call.first_token_s is not None or (call.delivered and call.has_moved):
            self._end(call, now, error=REPLICA_LOST)
            return
        call.has_moved = call.delivered
        call.delivered = False
        call.replica = None
        self._place(call, now)

    def _after_iteration(self, replica: SimReplica, result: StepResult, now: float) -> None:
        for request_id in result.prefilled:
            call = self._calls[request_id]
            if call.first_token_s is None and call.leg is not replica:
                call.first_token_s = now
                self._tell(replica, partial(self._tell_prefilled, request_id), now)
        for finished in result.finished:
            call = self._calls[finished.request_id]
            if call.leg is replica:
                self._transfers.end_leg(call, replica, finished, now)
            else:
                self._finish(replica, finished, now)
        self._place_next(now)
        events = replica.local.take_events()
        if events and self.config.event_delay_s is not None:
            time_s = now + self.config.event_delay_s + self.config.knowledge_delay_s
            self._agenda.at(time_s, Priority.REPORT, partial(self._report, replica, events))

    def _tell_transferred(self, request_id: RequestId, has_come: bool, now: float) -> None:
        if has_come:
            self._timers.scheduler.on_transferred(request_id, now)
        else:
            self._timers.scheduler.on_transfer_failed(request_id, now)

    def _tell_prefilled(self, request_id: RequestId, now: float) -> None:
        self._timers.scheduler.on_first_token(request_id, now)
        if self.admission is not None:
            self.admission.first_token(request_id)

    def _report(self, replica: SimReplica, events: list[KvEvent], now: float) -> None:
        if not replica.is_alive:
            return
        for event in events:
            if isinstance(event, BlocksStored):
                self._timers.scheduler.on_stored(event, now)
            else:
                self._timers.scheduler.on_evicted(event, now)

    def _sample(self, now: float) -> None:
        state = self._scheduler.snapshot()
        for replica in self._fleet.live.values():
            series = self._timeline.setdefault(replica.replica_id, ReplicaSeries())
            series.sample(replica, state.replicas[replica.replica_id].load_s, now)
        assert self.config.sample_s is not None
        if len(self._agenda):
            self._agenda.at(now + self.config.sample_s, Priority.SAMPLE, self._sample)

    def _look(self, now: float) -> None:
        """Ask the watch whether it has seen enough. If so, nothing more begins; what has begun ends as usual."""
        assert self.watch is not None
        calls = self._calls.values()
        num_waiting = sum(call.first_token_s is None for call in calls)
        oldest_s = min((call.scheduled_s for call in calls), default=now)
        if not self.watch.has_seen_enough(Glimpse(now, self._records, num_waiting, oldest_s)):
            self._agenda.at(now + self.watch.every_s, Priority.SAMPLE, self._look)
            return
        self._stopped_s = now
        begun = (session for session in self.workload.sessions() if (session[0].arrival_s or 0.0) <= now)
        self._num_expected = sum(map(len, begun))


def simulate(
    config: SimConfig,
    workload: Workload,
    on_record: Callable[[RequestRecord], None] = lambda record: None,
    *,
    policy: Policy | None = None,
    log: LogWriter | None = None,
    watch: Watch | None = None,
    target_of: Callable[[WorkloadRequest], Target] | None = None,
    tenant_of: Callable[[WorkloadRequest], str] = lambda asked: "all",
) -> SimResult:
    """Play a workload, whose arrivals are fixed, on a simulated cluster. Deterministic.

    `on_record` is given each request's record when it ends, for progress. `policy`: a fresh one to place by, in place
    of the one that `config` names; the result has its name. `log`: where every call of the global scheduler
    is written. `watch`: may end the run early. `target_of`: what each request asks for; they wait in the gateway then,
    the urgent first, and those that cannot have it are refused. `tenant_of`: who asks; tenants wait in fair turns.
    Raises: ConfigError: no such policy; TypeError: swapped arguments.
    """
    if not isinstance(config, SimConfig) or not isinstance(workload, Workload):
        given = f"{type(config).__name__}, {type(workload).__name__}"
        raise TypeError(f"simulate takes a SimConfig and a Workload, in this order; it got {given}")
    scheduler = make_cluster_scheduler(config, policy)
    if log is not None:
        if not isinstance(scheduler, GlobalScheduler):
            raise ConfigError("one decision log records one gateway; leave out --gateways, or the log")
        scheduler.listen(DecisionRecorder(log))
    if target_of is None:
        return Simulation(config, workload, scheduler=scheduler, on_record=on_record, watch=watch).run()
    return Simulation(
        config,
        workload,
        scheduler=scheduler,
        on_record=on_record,
        watch=watch,
        admission=FairAdmission(CostModel(config.told_profile), QueueSettings(max_waiting=len(workload.requests))),
        tenant_of=tenant_of,
        target_of=target_of,
    ).run()
