"""Replicas whose matches do not count: what is decided without them, and what goes on being believed."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import Placement, Reason, ReplicaId, ReplicaSpec, Request, RequestId
from preble.core.types.life import Started
from preble.decisions.explain import explain
from preble.decisions.reader import LogReader
from preble.decisions.recent import PlacedAt, RecentDecisions
from preble.decisions.settings import SchedulerSettings
from preble.errors import NoReplicaError
from preble.lab.replay.replay import Replay
from preble.lab.replay.what_if import what_if
from support.by_hand import A, B, C, scheduler_of
from support.logs import Recording

DOCUMENT = Random(1).sample(range(1 << 30), 100)
OLDER = Random(2).sample(range(1 << 30), 100)


def scheduler(*replica_ids: ReplicaId) -> GlobalScheduler:
    return scheduler_of("e2", *replica_ids)


def done(made: GlobalScheduler, request_id: str, avoid: frozenset[ReplicaId] = frozenset()) -> Placement:
    """Place the document and finish at once."""
    request = Request(RequestId(request_id), Request.of("", DOCUMENT).prompt, avoid=avoid)
    placement = made.place(request, 0.0)
    made.on_finish(placement.request_id, 1, 0.0)
    return placement


def test_a_replica_that_joins_is_trusted() -> None:
    assert scheduler(A).snapshot().replicas[A].trusted


def test_matches_on_an_untrusted_replica_count_as_none_and_come_back_with_trust() -> None:
    made = scheduler(A, B)
    home = done(made, "first").replica_id
    made.set_trust(home, False, 0.0)
    without = made.place(Request.of("without", DOCUMENT), 0.0)
    assert (without.reason, without.untrusted) == (Reason.EXPLORE, (home,))
    assert {candidate.matched_tokens for candidate in without.candidates} == {0}
    assert (
        made.snapshot().replicas[home].cached_tokens == made.matched_tokens(home, Request.of("", [*DOCUMENT, 1])) == 100
    )
    made.set_trust(home, True, 0.0)
    again = made.place(Request.of("again", [*DOCUMENT, 1]), 0.0)
    assert (again.reason, again.untrusted) == (Reason.EXPLOIT, ())
    assert max(candidate.matched_tokens for candidate in again.candidates) == 100
    made.check()


def test_others_are_exploited_as_before() -> None:
    made = scheduler(A, B, C)
    done(made, "on a", avoid=frozenset({B, C}))
    done(made, "on b", avoid=frozenset({A, C}))
    made.set_trust(A, False, 0.0)
    placement = made.place(Request.of("third", [*DOCUMENT, 1]), 0.0)
    assert (placement.reason, placement.replica_id, placement.matched_tokens) == (Reason.EXPLOIT, B, 100)


def test_the_work_of_a_request_that_lands_there_is_all_of_its_prompt() -> None:
    made = scheduler(A)
    done(made, "first")
    made.set_trust(A, False, 0.0)
    made.place(Request.of("second", DOCUMENT), 0.0)
    assert made.snapshot().replicas[A].waiting_prefill_tokens == 100
    made.move(RequestId("second"), A, 0.0)
    assert made.snapshot().replicas[A].waiting_prefill_tokens == 100


def test_the_belief_goes_on_being_compared_with_what_the_replica_reports() -> None:
    made = scheduler(A)
    made.place(Request.of("older", OLDER), 0.0)
    made.on_finish(RequestId("older"), 1, 0.0)
    done(made, "first")
    made.set_trust(A, False, 0.0)
    made.place(Request.of("second", [*DOCUMENT, 1]), 1.0)
    made.on_finish(RequestId("second"), 1, 1.0, cached_tokens=0)
    drift = made.snapshot().replicas[A].drift
    assert (drift.predicted_tokens, drift.reported_tokens) == (100, 0)
    assert made.matched_tokens(A, Request.of("", OLDER)) == 0, "LRU: with the newer one it has lost the older one too"


def test_one_of_the_same_name_that_comes_back_is_trusted() -> None:
    made = scheduler(A)
    made.set_trust(A, False, 0.0)
    made.remove_replica(A, 0.0)
    made.add_replica(ReplicaSpec(A), 0.0)
    assert made.place(Request.of("q", [1]), 0.0).untrusted == ()


def test_an_unknown_replica_can_be_neither_trusted_nor_not() -> None:
    with pytest.raises(NoReplicaError, match="no replica 'b'"):
        scheduler(A).set_trust(B, False, 0.0)


def test_a_log_with_trust_in_it_replays_and_is_put_to_other_policies(tmp_path: Path) -> None:
    recording = Recording(SchedulerSettings(policy="e2"))
    made = recording.scheduler
    for replica_id in (A, B):
        made.add_replica(ReplicaSpec(replica_id, block_size=1), 0.0)
    home = made.place(Request.of("first", DOCUMENT), 0.0).replica_id
    made.set_trust(home, False, 1.0)
    assert made.place(Request.of("second", [*DOCUMENT, 1]), 2.0).matched_tokens == 0
    made.set_trust(home, True, 3.0)
    assert made.place(Request.of("third", [*DOCUMENT, 2]), 4.0).matched_tokens == 100
    path = recording.written_to(tmp_path / "log.jsonl")
    result = Replay(LogReader(path)).run()
    assert (result.difference, result.compared) == (None, 3)
    assert what_if(path, "e2").hit_rate == pytest.approx(100 / 302)


def test_explain_names_who_was_not_trusted() -> None:
    made = scheduler(A, B)
    made.set_trust(B, False, 0.0)
    recent = RecentDecisions("e2", 10)
    recent.on(PlacedAt(made.place(Request.of("q", DOCUMENT), 0.0), 0.0), Started(), 0.0)
    [decision] = recent.of_request("q")
    assert "Not trusted, so their caches did not count: b." in explain(decision)
