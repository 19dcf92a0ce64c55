"""What replicas generate and report block by block, and where the next turn of a conversation goes."""

from __future__ import annotations

from preble.core.costs.model import CostModel, CostProfile
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.registry import make_policy
from preble.core.types import (
    BlocksEvicted,
    BlocksStored,
    Reason,
    ReplicaId,
    Request,
    RequestId,
    pack_tokens,
)
from support.by_hand import A, B, scheduler_of

MODEL = CostModel(CostProfile("unit", "made up", ((0, 0.0), (1000, 1.0)), 0.0, 0.0, 0.0, 0.0, 10_000))
BLOCK = 4
SYSTEM, QUESTION, ANSWER, NEXT = range(40), range(100, 108), range(200, 280), range(300, 308)
"""Token ids; whole blocks, the answer twenty of them."""


def scheduler(policy: str = "e2") -> GlobalScheduler:
    settings = {"window_s": 10.0, "report_grace_s": 0.0}
    return scheduler_of(policy, A, B, model=MODEL, settings=settings, block_size=BLOCK, reports_events=True)


def report(made: GlobalScheduler, replica_id: ReplicaId, token_ids: list[int], known: int = 0) -> None:
    """The replica stores these tokens a block at a time; block i is called i, and `known` were reported before."""
    for i in range(known, len(token_ids) // BLOCK):
        tokens = pack_tokens(token_ids[i * BLOCK : (i + 1) * BLOCK])
        assert made.on_stored(BlocksStored(replica_id, (i,), i - 1 if i else None, tokens, BLOCK), 0.0)
        made.check()


def test_an_answer_reported_block_by_block_is_one_prefix() -> None:
    """As a chain of one-block nodes it would always be outweighed by the system prompt, which every replica holds."""
    made = scheduler("round_robin")
    for replica_id, name in ((A, "first"), (B, "other")):
        prompt = [*SYSTEM, *(QUESTION if replica_id == A else NEXT)]
        assert made.place(Request.of(name, prompt), 0.0).replica_id == replica_id
        report(made, replica_id, prompt)
        made.on_finish(RequestId(name), len(ANSWER), 0.1)
    report(made, A, [*SYSTEM, *QUESTION, *ANSWER], known=12)
    made.policy = make_policy("e2")
    placement = made.place(Request.of("second", [*SYSTEM, *QUESTION, *ANSWER, *NEXT]), 0.2)
    assert (placement.replica_id, placement.reason, placement.matched_tokens) == (A, Reason.EXPLOIT, 128)
    assert [candidate.replica_id for candidate in placement.candidates] == [A], "only one holds the key portion"


def test_a_run_that_grew_is_evicted_to_the_block() -> None:
    made = scheduler()
    whole = [*QUESTION, *ANSWER]
    report(made, A, whole)
    request = Request.of("again", [*whole, 1])
    assert made.matched_tokens(A, request) == 88
    made.on_evicted(BlocksEvicted(A, (21, 20)), 0.0)
    made.check()
    assert (made.matched_tokens(A, request), made.matched_tokens(B, request)) == (80, 0)
    report(made, A, whole, known=20)
    assert made.matched_tokens(A, request) == 88


def test_what_another_replica_holds_too_does_not_grow_for_it() -> None:
    made = scheduler()
    report(made, A, [*QUESTION])
    report(made, B, [*QUESTION])
    report(made, A, [*QUESTION, *ANSWER], known=2)
    request = Request.of("again", [*QUESTION, *ANSWER, 1])
    assert (made.matched_tokens(A, request), made.matched_tokens(B, request)) == (88, 8)


def test_the_prompt_of_a_request_in_flight_does_not_grow() -> None:
    """Nothing but its own prompt is promised to the replica, and that is given up with the request."""
    made = scheduler("round_robin")
    made.place(Request.of("running", list(QUESTION)), 0.0)
    report(made, A, [*QUESTION, *ANSWER])
    made.on_evicted(BlocksEvicted(A, tuple(range(21, 1, -1))), 0.0)
    made.check()
    assert made.snapshot().num_index_tokens == len(QUESTION)
