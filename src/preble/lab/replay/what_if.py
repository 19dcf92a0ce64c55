"""What another policy would have done with the requests of a log.

A log does not show what the engines would have cached and evicted if the requests had gone elsewhere: its KV events and
reported cached tokens belong to the placements that were made. So here no replica reports anything; the scheduler
estimates what it caches, within its KV capacity. Times of first tokens and ends, and output lengths, are as logged, and
so is where other gateways placed. The logged policy is played in the same way, so that the comparison is fair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import msgspec

from preble.core.costs.model import CostModel
from preble.core.types import PeerId, ReplicaId, RequestId
from preble.core.types.life import Ended, Moved
from preble.decisions.lines import (
    AddReplicaLine,
    Event,
    PeerForgottenLine,
    PeerHeldLine,
    PeerPlacedLine,
    PlaceLine,
    PlacementRow,
    RemoveReplicaLine,
    ReportLine,
    TransfersLine,
    TrustLine,
    placement_row,
)
from preble.decisions.reader import LogReader, Numbered
from preble.decisions.settings import make_scheduler
from preble.errors import PrebleError
from preble.lab.replay.replay import check_policy, place, report, tell


class ReplicaShare(msgspec.Struct):
    """One replica's share. `work_s`: GPU seconds of the requests placed there, by the log's cost profile."""

    placements: int = 0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    work_s: float = 0.0


class PolicyOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One policy over the whole log.

    `failed`: requests that no policy could place. `hit_rate`: prompt tokens estimated to be cached where they were
    placed / all that were placed; 0 for none. `load_imbalance`: the busiest replica's work / the mean of all replicas;
    1 is even, and also stands for no work. `moved`: placements on another replica than in the log; `moves` lists them
    as [request, logged replica, replica here].
    """

    policy: str
    as_logged: bool
    placements: int
    failed: int
    hit_rate: float
    load_imbalance: float
    replicas: dict[str, ReplicaShare]
    moved: int
    moves: list[tuple[str, str, str]]


class _Tally:
    """Counts placements and, when their output length is known, their work."""

    def __init__(self, model: CostModel) -> None:
        self.failed = 0
        self._model = model
        self._shares: dict[str, ReplicaShare] = {}
        self._moves: list[tuple[str, str, str]] = []
        self._where: dict[str, str] = {}

    def replica(self, replica: str) -> None:
        self._shares.setdefault(replica, ReplicaShare())

    def placed(self, line: PlaceLine, logged: PlacementRow, placement: PlacementRow) -> None:
        if placement.replica != logged.replica:
            self._moves.append((line.id, logged.replica, placement.replica))
        share = self._shares[placement.replica]
        share.placements += 1
        share.prompt_tokens += line.num_prompt_tokens
        share.matched_tokens += placement.matched_tokens
        missed = line.num_prompt_tokens - placement.matched_tokens
        share.work_s += self._model.prefill_s(missed, placement.matched_tokens)
        self._where[line.id] = placement.replica

    def ended(self, request_id: str, output_tokens: int) -> None:
        replica = self._where.pop(request_id, None)
        if replica is not None:
            self._shares[replica].work_s += self._model.decode_s(output_tokens)

    def outcome(self, policy: str, *, as_logged: bool) -> PolicyOutcome:
        shares = self._shares.values()
        prompt_tokens = sum(share.prompt_tokens for share in shares)
        work_s = [share.work_s for share in shares]
        return PolicyOutcome(
            policy=policy,
            as_logged=as_logged,
            placements=sum(share.placements for share in shares),
            failed=self.failed,
            hit_rate=sum(share.matched_tokens for share in shares) / prompt_tokens if prompt_tokens else 0.0,
            load_imbalance=max(work_s) * len(work_s) / sum(work_s) if sum(work_s) else 1.0,
            replicas=self._shares,
            moved=len(self._moves),
            moves=self._moves,
        )


def logged_outcome(path: Path) -> PolicyOutcome:
    """Return what was done, from the log alone. Raises: TraceFormatError."""
    log = LogReader(path)
    tally = _Tally(CostModel(log.header.profile))
    for _, event in log:
        match event:
            case AddReplicaLine(replica=spec):
                tally.replica(spec.replica_id)
            case PlaceLine(placement=None):
                tally.failed += 1
            case PlaceLine(placement=placement):
                assert placement is not None
                tally.placed(event, placement, placement)
            case ReportLine(id=request_id, fact=Ended() as end, peer=""):
                tally.ended(request_id, end.output_tokens or 0)
    return tally.outcome(log.header.settings.policy, as_logged=True)


def what_if(path: Path, policy: str) -> PolicyOutcome:
    """Return what `policy` would have done; see the head of this module. Deterministic.

    Raises: TraceFormatError: the log is damaged. ConfigError: no such policy.
    """
    log = LogReader(path)
    run = _Run(log, policy)
    for numbered in log:
        run.play(numbered)
    return run.tally.outcome(policy, as_logged=False)


class _Run:
    """Plays a log's requests through another scheduler. `logged`: the logged replica of each request in flight."""

    def __init__(self, log: LogReader, policy: str) -> None:
        # The log has times of the logged placements only, so there is nothing to correct the cost model with.
        settings = msgspec.structs.replace(log.header.settings, policy=policy, refit=False)
        self._log = log
        self._scheduler = make_scheduler(settings, log.header.profile, learned=log.header.learned)
        self.tally = _Tally(CostModel(log.header.profile))
        self._logged: dict[str, str] = {}
        self._in_flight: set[str] = set()

    def play(self, numbered: Numbered) -> None:
        """Raises: TraceFormatError."""
        number, event = numbered
        try:
            self._run_timers(event.t)
            self._take(event)
        except (PrebleError, ValueError) as error:
            raise self._log.error(number, error) from error

    def _run_timers(self, until_s: float) -> None:
        """Run this scheduler's own timers at their times; the logged ones belong to another scheduler."""
        while (due_s := self._scheduler.next_timer()) is not None and due_s <= until_s:
            self._scheduler.on_timer(due_s)

    def _take(self, event: Event) -> None:
        match event:
            case AddReplicaLine(replica=spec):
                self._scheduler.add_replica(dataclasses.replace(spec, reports_events=False), event.t)
                self.tally.replica(spec.replica_id)
            case RemoveReplicaLine(replica=replica):
                self._remove(replica, event.t)
            case PlaceLine():
                self._place(event)
            case ReportLine():
                self._report(event)
            case TrustLine() | TransfersLine() | PeerPlacedLine() | PeerHeldLine() | PeerForgottenLine():
                tell(self._scheduler, event)

    def _place(self, line: PlaceLine) -> None:
        logged = line.placement
        if logged is None:
            self.tally.failed += 1
            return
        placement, error = place(self._scheduler, line)
        if placement is None:
            raise ValueError(f"request {line.id!r} was placed, but no policy can place it ({error})")
        self.tally.placed(line, logged, placement_row(placement))
        self._logged[line.id] = logged.replica
        self._in_flight.add(line.id)

    def _report(self, line: ReportLine) -> None:
        fact, request_id = line.fact, line.id
        if isinstance(fact, Ended):  # what is cached there says nothing of another placement
            fact = Ended(output_tokens=fact.output_tokens)
        if line.peer:
            report(self._scheduler, PeerId(line.peer), RequestId(request_id), fact, line.t)
            return
        if isinstance(fact, Moved):
            self._logged[request_id] = fact.replica_id
            return
        if isinstance(fact, Ended):
            if self._logged.pop(request_id, None) is None:
                raise ValueError(f"request {request_id!r} is not in flight")
            self.tally.ended(request_id, fact.output_tokens or 0)
        if request_id in self._in_flight:
            report(self._scheduler, PeerId(""), RequestId(request_id), fact, line.t)
            if isinstance(fact, Ended):
                self._in_flight.discard(request_id)

    def _remove(self, replica: str, now: float) -> None:
        """End the requests that were lost with the replica in the log; drop those that are on it only here."""
        for request in self._scheduler.remove_replica(ReplicaId(replica), now):
            self._in_flight.discard(request.request_id)
        for request_id in [r for r, where in self._logged.items() if where == replica]:
            del self._logged[request_id]
            if request_id in self._in_flight:
                self._in_flight.discard(request_id)
                self._scheduler.on_finish(RequestId(request_id), 0, now)


def outcomes(path: Path, policies: tuple[str, ...], *, import_policy: bool = False) -> Iterator[PolicyOutcome]:
    """Return what was done, then the logged policy and each of `policies`, all played in the same way.

    Raises: as `what_if`. ConfigError: see `check_policy`; a policy among `policies` may be imported.
    """
    check_policy(log := LogReader(path), import_policy=import_policy or log.header.settings.policy in policies)
    logged = logged_outcome(path)
    yield logged
    for policy in dict.fromkeys((logged.policy, *policies)):
        yield what_if(path, policy)
