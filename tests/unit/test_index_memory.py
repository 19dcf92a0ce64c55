"""What is over leaves nothing behind in the prefix index, however it ended and whatever clients sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.prefixes.radix_tree import RadixTree
from preble.core.types import BlocksStored, ReplicaId, Request, RequestId, namespace_of, pack_tokens
from support.by_hand import A, B, run_of, scheduler_of

BLOCK = 4


def scheduler(*replica_ids: ReplicaId) -> GlobalScheduler:
    return scheduler_of("round_robin", *replica_ids, block_size=BLOCK, reports_events=True)


def store_first_block(made: GlobalScheduler, replica_id: ReplicaId, prompt: list[int]) -> None:
    made.on_stored(BlocksStored(replica_id, (1,), None, pack_tokens(prompt[:BLOCK]), BLOCK), 0.0)


def test_of_an_aborted_prompt_only_what_was_stored_stays() -> None:
    """Chunked prefill: the first block is stored, then the client leaves."""
    made, prompt = scheduler(A), run_of(1, 10_000)
    made.place(Request.of("aborted", prompt), 0.0)
    store_first_block(made, A, prompt)
    made.on_finish(RequestId("aborted"), 0, 0.1)
    made.check()
    assert made.snapshot().num_index_tokens == BLOCK


def test_where_a_request_was_moved_from_only_what_was_stored_stays() -> None:
    made, prompt = scheduler(A, B), run_of(1, 10_000)
    assert made.place(Request.of("moved", prompt), 0.0).replica_id == A
    store_first_block(made, A, prompt)
    made.move(RequestId("moved"), B, 0.1)
    made.on_finish(RequestId("moved"), 0, 0.2)
    made.check()
    assert made.snapshot().num_index_tokens == BLOCK


def test_a_namespace_is_gone_with_its_last_prompt() -> None:
    tree, prompt = RadixTree(), pack_tokens([1, 2, 3])
    assert tree.match(prompt, "asked for").num_tokens == 0
    tree.check()
    [leaf] = tree.insert(prompt, "salted")
    assert (tree.num_nodes, tree.match(prompt, "salted").num_tokens) == (2, 3), (
        "its root counts, so that it is paid for"
    )
    tree.remove(leaf)
    tree.check()
    assert (tree.num_nodes, tree.match(prompt, "salted").num_tokens) == (0, 0)


def test_requests_that_each_have_a_salt_of_their_own_leave_nothing_behind() -> None:
    made = scheduler(A)
    for i in range(100):
        request = replace(Request.of(f"q{i}", run_of(i, 8)), namespace=namespace_of(cache_salt=f"salt {i}"))
        made.place(request, 0.0)
        made.on_finish(request.request_id, 1, 0.0)
    made.on_timer(1e6)
    made.check()
    assert made.snapshot().num_index_bytes == 0


@pytest.mark.parametrize("length", [1, 63, 64, 1_000_000])
def test_a_namespace_is_short_however_long_the_salt(length: int) -> None:
    names = {namespace_of(lora, salt) for lora in (None, "sql") for salt in ("a" * length, "a" * length + "b")}
    assert len(names) == 4 and max(map(len, names)) <= 64
