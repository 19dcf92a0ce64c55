"""The last decisions, kept in memory for questions: the candidates, the choice, and how the request ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nsmallest
from operator import attrgetter
from typing import Protocol

import msgspec

from preble.core.types import Candidate, Placement, Reason, RequestId, Transfer, Ways
from preble.core.types.life import Ended, Fact, FirstToken, Lost, Outcome, Started, TransferFailed, Transferred

CANDIDATES_PER_DECISION = 25
"""Candidates budgeted per decision. With more replicas fewer decisions are kept, so memory is bounded."""


class CandidateCost(msgspec.Struct, frozen=True):
    """One candidate replica. Costs in seconds: L, M and P of Algorithm 2. The other fields: see `Candidate`."""

    replica: str
    matched_tokens: int
    load_s: float
    eviction_s: float
    prefill_s: float
    score: float | None = None
    loaded_tokens: int = 0
    own_wait_s: float | None = None
    own_prefill_s: float | None = None
    copied_tokens: int = 0
    copy_s: float = 0.0
    ways: Ways | None = None

    @property
    def cost_s(self) -> float:
        return self.load_s + self.eviction_s + self.prefill_s


_COSTS = attrgetter("replica_id", *CandidateCost.__struct_fields__[1:])
"""Reads a candidate's fields, in their order."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One placement and how its request ended.

    `placed_at`: Unix time in seconds. `first_token_s`, `end_s`: seconds after the placement; None before they happen.
    `outcome`: how it ended. `replica_lost`: the replica left the rotation
    while the request ran there. `cached_tokens`: prompt tokens that the replica reported as cached, None if it did not.
    `untrusted`: replicas whose caches did not count. `predicted_ttft_s`: what `first_token_s` was expected to be.
    `transfer`: what another replica was to send first, None for nothing; `transferred_s`: seconds after which it was
    there or had failed (`transfer_failed`), None before that. `predicted_ttft_p98_s`: what `first_token_s` was to
    keep in 98 of 100 cases. `predicted_tpot_s`, `predicted_tpot_p98_s`: the same of `tpot_s`. `asked`: what its client
    asked for besides an answer, None where it is unknown.
    """

    request_id: str
    policy: str
    placed_at: float
    replica: str
    reason: Reason
    num_prompt_tokens: int
    matched_tokens: int
    candidates: list[CandidateCost]
    untrusted: tuple[str, ...] = ()
    predicted_ttft_s: float | None = None
    transfer: Transfer | None = None
    transferred_s: float | None = None
    transfer_failed: bool = False
    predicted_ttft_p98_s: float | None = None
    predicted_tpot_s: float | None = None
    predicted_tpot_p98_s: float | None = None
    asked: str | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    outcome: Outcome | None = None
    replica_lost: bool = False
    output_tokens: int = 0
    cached_tokens: int | None = None

    @property
    def tpot_s(self) -> float | None:
        """Return seconds between two tokens; None where the answer had less than two, or its first was not seen."""
        if self.first_token_s is None or self.end_s is None or self.output_tokens < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.output_tokens - 1)


class Asking(Protocol):
    """On which terms a request is placed."""

    @property
    def asked(self) -> str | None:
        """See `Decision`."""


@dataclass(slots=True)
class _Record:
    """One placement while it is kept."""

    placement: Placement
    placed_at: float
    terms: Asking | None
    transferred_at: float | None = None
    transfer_failed: bool = False
    first_token_at: float | None = None
    end_at: float | None = None
    outcome: Outcome | None = None
    replica_lost: bool = False
    output_tokens: int = 0
    cached_tokens: int | None = None


class KeptPlacement(Protocol):
    """A placement that is followed. `terms`: of its request, None where they are unknown."""

    placement: Placement
    placed_at: float

    @property
    def terms(self) -> Asking | None: ...


@dataclass(slots=True)
class PlacedAt:
    """A placement and its time, of which no more is known."""

    placement: Placement
    placed_at: float
    terms: None = None


class RecentDecisions:
    """The last `limit` decisions, fewer on a cluster of more than 25 replicas. O(1) a decision.

    `unix_offset_s`: Unix time minus the scheduler's time.
    """

    def __init__(self, policy: str, limit: int, *, unix_offset_s: float = 0.0) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        self.limit = limit
        self._policy = policy
        self._unix_offset_s = unix_offset_s
        self._records: deque[_Record] = deque()
        self._num_candidates = 0
        self._open: dict[RequestId, _Record] = {}
        """Those that have not ended."""

    def __len__(self) -> int:
        return len(self._records)

    def on(self, placed: KeptPlacement, fact: Fact, now: float) -> None:
        """Keep a placement that starts and forget old ones; note what happens to one."""
        request_id = placed.placement.request_id
        if isinstance(fact, Started):
            self._open[request_id] = self._keep(placed)
        elif (record := self._open.get(request_id)) is None:
            return
        elif isinstance(fact, FirstToken):
            record.first_token_at = now
        elif isinstance(fact, Transferred | TransferFailed):
            record.transferred_at, record.transfer_failed = now, isinstance(fact, TransferFailed)
        elif isinstance(fact, Lost):
            record.replica_lost = True
        elif isinstance(fact, Ended):
            del self._open[request_id]
            record.end_at, record.outcome = now, fact.outcome
            record.output_tokens, record.cached_tokens = fact.output_tokens or 0, fact.cached_tokens

    def _keep(self, placed: KeptPlacement) -> _Record:
        record = _Record(placed.placement, placed.placed_at, placed.terms)
        self._records.append(record)
        self._num_candidates += len(placed.placement.candidates)
        room = self.limit * CANDIDATES_PER_DECISION
        while len(self._records) > self.limit or (self._num_candidates > room and len(self._records) > 1):
            self._num_candidates -= len(self._records.popleft().placement.candidates)
        return record

    def of_request(self, request_id: str) -> list[Decision]:
        """Return the placements of this request that are still known, in order; for ID#N only those of prompt N.

        A request with several prompts has one placement for each, ID#N. O(decisions kept): people ask seldom.
        """
        several = request_id + "#"
        return [
            self._decision(record)
            for record in self._records
            if (own_id := record.placement.request_id) == request_id or own_id.startswith(several)
        ]

    def placed(self, count: int) -> dict[float, RequestId]:
        """Return the last `count` requests by when they were placed, by the scheduler's clock."""
        last = zip(reversed(self._records), range(count), strict=False)
        return {record.placed_at: record.placement.request_id for record, _ in last}

    def latest(self, count: int, num_candidates: int | None = None) -> Iterator[Decision]:
        """Return the last `count`, newest first.

        `num_candidates`: only this many of each, the chosen one first and then the cheapest.
        """
        newest_first = reversed(self._records)
        return (self._decision(record, num_candidates) for record, _ in zip(newest_first, range(count), strict=False))

    def _decision(self, record: _Record, num_candidates: int | None = None) -> Decision:
        placement, weighed = record.placement, record.placement.candidates
        if num_candidates is not None:
            weighed = nsmallest(num_candidates, weighed, key=lambda c: (c.replica_id != placement.replica_id, _cost(c)))
        return Decision(
            request_id=placement.request_id,
            policy=self._policy,
            placed_at=record.placed_at + self._unix_offset_s,
            replica=placement.replica_id,
            reason=placement.reason,
            num_prompt_tokens=placement.num_prompt_tokens,
            matched_tokens=placement.matched_tokens,
            candidates=[CandidateCost(*_COSTS(candidate)) for candidate in weighed],
            untrusted=placement.untrusted,
            predicted_ttft_s=placement.predicted_ttft_s,
            transfer=placement.transfer,
            transferred_s=_since(record.placed_at, record.transferred_at),
            transfer_failed=record.transfer_failed,
            predicted_ttft_p98_s=placement.predicted_ttft_p98_s,
            predicted_tpot_s=placement.predicted_tpot_s,
            predicted_tpot_p98_s=placement.predicted_tpot_p98_s,
            asked=None if record.terms is None else record.terms.asked,
            first_token_s=_since(record.placed_at, record.first_token_at),
            end_s=_since(record.placed_at, record.end_at),
            outcome=record.outcome,
            replica_lost=record.replica_lost,
            output_tokens=record.output_tokens,
            cached_tokens=record.cached_tokens,
        )


def _cost(candidate: Candidate) -> float:
    return candidate.cost_s if candidate.score is None else candidate.score


def _since(start: float, time: float | None) -> float | None:
    return None if time is None else time - start
