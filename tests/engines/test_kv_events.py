"""The stream of KV events against a publisher that restarts, forgets, loses and talks rubbish."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from preble.core.types import (
    BlocksDemoted,
    BlocksEvicted,
    BlocksStored,
    CacheCleared,
    EventsLost,
    KvEvent,
    ReplicaId,
    Tier,
    namespace_of,
    pack_tokens,
    unpack_tokens,
)
from preble.engines.kv_events.intake import LARGE_BYTES, EventIntake
from preble.engines.kv_events.sockets import KvEventEndpoints, KvMessage
from preble.engines.kv_events.stream import KvEventStream
from preble.engines.kv_events.subscription import Subscription
from preble.engines.kv_events.wire import WireRemoved, decode_large
from preble.engines.media_marks import mark_of
from support.kv_publisher import TOPIC, ScriptedPublisher, cleared, removed, stored
from support.relay import TcpRelay
from support.waiting import eventually

REPLICA = ReplicaId("r0")


class Follower:
    """Takes everything from a stream: the events in order, and which blocks they leave cached."""

    def __init__(self, stream: KvEventStream) -> None:
        self.stream = stream
        self.events: list[KvEvent] = []
        self.cached: set[int | bytes] = set()
        self.calls: list[int] = []
        """How many changes each call gave."""

    async def run(self) -> None:
        await self.stream.follow(self.take)

    def take(self, changes: Sequence[KvEvent]) -> None:
        self.calls.append(len(changes))
        for event in changes:
            self.events.append(event)
            match event:
                case BlocksStored():
                    self.cached |= set(event.block_hashes)
                case BlocksEvicted():
                    self.cached -= set(event.block_hashes)
                case CacheCleared():
                    self.cached.clear()

    @property
    def starts(self) -> int:
        return sum(isinstance(event, CacheCleared) for event in self.events)

    async def sees(self, *blocks: int) -> None:
        """Return when exactly these blocks are believed to be cached."""
        await eventually(lambda: self.cached == set(blocks), f"cached == {set(blocks)}, it is {self.cached}")


@asynccontextmanager
async def following(publisher: ScriptedPublisher, **options: Any) -> AsyncIterator[Follower]:
    """A follower that is subscribed and has caught up."""
    options = {"idle_check_s": 1000.0, **options}
    follower = Follower(KvEventStream(REPLICA, publisher.endpoints, **options))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follower.run())
        await publisher.subscribed()
        await eventually(lambda: follower.stream.has_caught_up, "caught up")
        try:
            yield follower
        finally:
            follower.stream.close()


async def test_the_stream_starts_with_a_cleared_cache_before_anything_is_connected() -> None:
    async with ScriptedPublisher() as publisher:
        endpoints = publisher.endpoints
    stream = KvEventStream(REPLICA, endpoints)
    taken: list[KvEvent] = []
    following = asyncio.create_task(stream.follow(taken.extend))
    await asyncio.sleep(0)
    assert taken == [CacheCleared(REPLICA, is_past=True)]
    following.cancel()
    await asyncio.wait([following])
    assert stream.closed


async def test_stored_blocks_arrive_with_their_tokens_and_parent() -> None:
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        await publisher.publish(stored(10, 20), stored(30, parent=20))
        await follower.sees(10, 20, 30)
        assert follower.events[1:] == [
            BlocksStored(REPLICA, (10, 20), None, pack_tokens([10, 11, 20, 21]), 2),
            BlocksStored(REPLICA, (30,), 20, pack_tokens([30, 31]), 2),
        ]


async def test_messages_that_come_together_are_given_at_once() -> None:
    async with ScriptedPublisher() as publisher:
        await publisher.publish(stored(1))
        async with following(publisher) as follower:
            subscription = follower.stream._subscription
            assert subscription is not None
            subscription.on_messages([live(1, stored(2)), live(2, stored(3), removed(1)), live(3, stored(4))])
            assert (follower.cached, follower.calls[-1]) == ({2, 3, 4}, 4)


async def test_what_comes_together_is_applied_in_parts_if_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preble.engines.kv_events.stream.SLICE_S", 0.0)  # ships 0.002 s
    async with ScriptedPublisher() as publisher:
        await publisher.publish(stored(1))
        async with following(publisher) as follower:
            subscription = follower.stream._subscription
            assert subscription is not None
            subscription.on_messages([live(1, stored(2)), live(2, stored(3)), live(3, stored(4))])
            assert follower.cached == {1, 2}
            await follower.sees(1, 2, 3, 4)


@pytest.mark.parametrize("asks_for_a_new_start", [False, True])
async def test_what_a_follower_raises_ends_the_stream_and_not_the_connection(asks_for_a_new_start: bool) -> None:
    def fail(changes: Sequence[KvEvent]) -> None:
        if isinstance(changes[0], BlocksEvicted):
            if asks_for_a_new_start:
                stream.resync()
            raise ArithmeticError

    async with ScriptedPublisher() as publisher:
        await publisher.publish(stored(1))
        stream = KvEventStream(REPLICA, publisher.endpoints)
        following = asyncio.create_task(stream.follow(fail))
        await eventually(lambda: stream.has_caught_up, "caught up")
        subscription = stream._subscription
        assert subscription is not None
        subscription.on_messages([live(1, removed(1))])
        with pytest.raises(ArithmeticError):
            await following
        assert stream.closed


def live(number: int, *events: dict[str, Any]) -> list[bytes]:
    """The frames of a message."""
    return [TOPIC.encode(), number.to_bytes(8, "big"), msgspec.msgpack.encode([0.0, events])]


async def test_a_late_joiner_gets_everything_that_is_cached() -> None:
    async with ScriptedPublisher() as publisher:
        await publisher.publish(stored(1, 2, 3))
        await publisher.publish(removed(3))
        async with following(publisher) as follower:
            await follower.sees(1, 2)
            await publisher.publish(stored(4, parent=2))
            await follower.sees(1, 2, 4)
            assert follower.starts == 1


async def test_a_late_joiner_of_a_publisher_that_forgot_the_beginning_hears_that_the_past_is_cut() -> None:
    async with ScriptedPublisher(keeps=4) as publisher:
        await publisher.publish(stored(1))
        await publisher.publish(stored(2, parent=1))
        await publisher.publish(stored(3, parent=2))
        await publisher.publish(stored(7))
        await publisher.publish(stored(8, parent=7))
        async with following(publisher) as follower:
            await follower.sees(2, 3, 7, 8)
            told = [event for event in follower.events if isinstance(event, BlocksStored)]
            assert all(event.past_is_cut for event in told)
            await publisher.publish(removed(3, 2), stored(2, parent=1))
            await follower.sees(2, 7, 8)


async def test_messages_lost_on_the_way_are_asked_for_again() -> None:
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        await publisher.publish(stored(1))
        await follower.sees(1)
        await publisher.publish(stored(2, parent=1), lose=True)
        await publisher.publish(removed(1), lose=True)
        await publisher.publish(stored(5))
        await follower.sees(2, 5)
        assert follower.starts == 1, "nothing had to be forgotten"
        assert [event for event in follower.events if isinstance(event, BlocksStored)][1].block_hashes == (2,)


async def test_a_gap_that_cannot_be_filled_starts_over_with_what_is_known() -> None:
    async with ScriptedPublisher(keeps=2) as publisher, following(publisher) as follower:
        await publisher.publish(stored(1))
        await follower.sees(1)
        for block in (2, 3, 4):
            await publisher.publish(stored(block), lose=True)
        await publisher.publish(stored(5))
        await follower.sees(4, 5)
        assert follower.starts == 2


async def test_without_replay_a_gap_starts_over() -> None:
    async with ScriptedPublisher(replays=False) as publisher, following(publisher) as follower:
        await publisher.publish(stored(1))
        await follower.sees(1)
        await publisher.publish(removed(1), lose=True)
        await publisher.publish(stored(2))
        await follower.sees(2)
        assert follower.starts == 2


async def test_a_lost_last_message_is_noticed_in_the_following_silence() -> None:
    async with ScriptedPublisher() as publisher, following(publisher, idle_check_s=0.05) as follower:
        await publisher.publish(stored(1))
        await follower.sees(1)
        await publisher.publish(removed(1), lose=True)
        await follower.sees()
        assert follower.starts == 1


async def test_a_message_that_comes_twice_counts_once() -> None:
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        await publisher.publish(stored(1))
        await publisher.repeat()
        await publisher.publish(removed(1))
        await follower.sees()
        await eventually(lambda: follower.stream.counters.duplicates == 1, "the duplicate was seen")
        assert follower.starts == 1


async def test_holes_in_a_replay_are_asked_for_again() -> None:
    async with ScriptedPublisher() as publisher:
        for block in (1, 2, 3, 4, 5):
            await publisher.publish(stored(block))
        publisher.holes = {2, 3}
        async with following(publisher) as follower:
            await follower.sees(1, 2, 3, 4, 5)
            assert publisher.replay_requests == [0, 1]
            assert follower.starts == 1


@pytest.mark.parametrize("published_since", [0, 1, 2, 3, 10])
async def test_a_restarted_engine_is_noticed_however_far_its_numbers_have_come(published_since: int) -> None:
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        for block in (1, 2, 3):
            await publisher.publish(stored(block))
        await follower.sees(1, 2, 3)
        await publisher.restart()
        for block in range(100, 100 + published_since):
            await publisher.publish(stored(block))
        await follower.sees(*range(100, 100 + published_since))
        await publisher.subscribed()
        await publisher.publish(stored(200))
        await follower.sees(*range(100, 100 + published_since), 200)
        assert follower.starts == 2


async def test_without_replay_a_lost_connection_starts_over() -> None:
    async with ScriptedPublisher(replays=False) as publisher, following(publisher) as follower:
        await publisher.publish(stored(1))
        await follower.sees(1)
        await publisher.restart()
        await follower.sees()


async def test_numbers_that_go_back_without_a_new_connection_start_over() -> None:
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        for block in (1, 2, 3):
            await publisher.publish(stored(block))
        await follower.sees(1, 2, 3)
        publisher._seq = 0
        publisher._buffer.clear()
        await publisher.publish(stored(9))
        await follower.sees(9)


async def test_resync_forgets_and_asks_without_endything() -> None:
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        await publisher.publish(stored(1))
        await follower.sees(1)
        follower.stream.resync()
        await eventually(lambda: follower.starts == 2, "started over")
        await follower.sees(1)
        assert publisher.replay_requests[-1] == 0


async def test_what_is_replayed_of_old_is_reported_as_past_and_what_happens_now_as_present() -> None:
    async with ScriptedPublisher() as publisher:
        await publisher.publish(stored(1))
        await publisher.publish(cleared())
        async with following(publisher) as follower:
            await publisher.publish(stored(2))
            await follower.sees(2)
            await publisher.publish(cleared())
            await follower.sees()
        told = [event.is_past for event in follower.events if isinstance(event, CacheCleared)]
        assert told == [True, True, False]


async def test_a_cleared_cache_is_passed_on() -> None:
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        await publisher.publish(stored(1, 2))
        await publisher.publish(cleared(), stored(3))
        await follower.sees(3)


async def test_evictions_that_follow_one_another_are_one() -> None:
    """vLLM sends one for each block, and one for each of its copies."""
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        await publisher.publish(stored(1, 2), stored(1, 2))
        await publisher.publish(removed(2), removed(1), stored(50))
        await publisher.publish(removed(2), removed(1), stored(60))
        await follower.sees(50, 60)
        evictions = [event for event in follower.events if isinstance(event, BlocksEvicted)]
        assert evictions == 2 * [BlocksEvicted(REPLICA, (2, 1))]


async def test_what_a_removal_is_about_keeps_it_apart() -> None:
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        await publisher.publish(stored(1, 2, 3), stored(2, medium="CPU"))
        await publisher.publish(removed(3), removed(2), removed(2, medium="CPU"), removed(1), stored(50))
        await follower.sees(50)
        gone = [event for event in follower.events if isinstance(event, (BlocksEvicted, BlocksDemoted))]
        assert gone == [
            BlocksEvicted(REPLICA, (3,)),
            BlocksDemoted(REPLICA, (2,)),
            BlocksEvicted(REPLICA, (2,), Tier.HOST),
            BlocksEvicted(REPLICA, (1,)),
        ]


async def test_rubbish_of_every_kind_is_survived_and_counted() -> None:
    encode = msgspec.msgpack.encode
    payloads = [
        b"",
        b"\xc1",
        b"not msgpack",
        encode({"ts": 1}),
        encode([1.0]),
        encode([1.0, "events"]),
        encode(["x", []]),
    ]
    events: list[Any] = [
        5,
        None,
        [],
        {},
        {"type": 7},
        {"type": "BlockStored"},
        stored(1, 2) | {"token_ids": [1]},
        stored(1) | {"token_ids": [1, -1]},
        stored(1) | {"token_ids": [1, 2**63]},
        stored(1) | {"token_ids": ["a", "b"]},
        stored(1) | {"block_size": 0},
        stored(1) | {"extra_keys": []},
        removed(1) | {"block_hashes": 1},
        ["BlockRemoved"],
    ]
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        for payload in payloads:
            await publisher.publish_payload(payload)
        for event in events:
            await publisher.publish(event)
        await publisher.send(TOPIC.encode())
        await publisher.send(TOPIC.encode(), b"123", b"payload")
        await publisher.send(TOPIC.encode(), bytes(8), b"payload", b"more")
        await publisher.publish(stored(77))
        await follower.sees(77)
        assert follower.stream.counters.malformed == len(payloads) + len(events) + 3
        assert follower.starts == 1


async def test_unknown_events_and_fields_are_ignored_and_the_rest_of_the_message_counts() -> None:
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        await publisher.publish(
            {"type": "BlockMoved", "from": 1}, ["BlockShared", 1], stored(1, colour="blue", session_id="s"), removed(9)
        )
        await follower.sees(1)
        assert follower.stream.counters.unknown == 2
        assert follower.stream.counters.malformed == 0


async def test_events_encoded_as_arrays_mean_the_same() -> None:
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        await publisher.publish(["BlockStored", [1, 2], None, [1, 2, 2, 3], 2, None])
        await publisher.publish(["BlockStored", [b"\x01" * 32], 2, [8, 9], 2, None, "GPU", None, None, 0, "new", 1, 2])
        await publisher.publish(["BlockRemoved", [2], "GPU"])
        await eventually(lambda: follower.cached == {1, b"\x01" * 32}, "arrays understood")
        await publisher.publish(["AllBlocksCleared"])
        await follower.sees()


async def test_blocks_outside_gpu_memory_or_of_partial_attention_are_ignored() -> None:
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        await publisher.publish(
            stored(1, medium="CPU"),
            stored(2, group_idx=1, kv_cache_spec_kind="sliding_window"),
            stored(3, group_idx=0, kv_cache_spec_kind="full_attention"),
            removed(3, medium="CPU"),
            removed(3, group_idx=1),
        )
        await publisher.publish(stored(4))
        await follower.sees(3, 4)


async def test_adapter_and_salt_make_a_namespace() -> None:
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        await publisher.publish(
            stored(1, 2, extra_keys=[["pepper"], None]),
            stored(3, parent=2),
            stored(4, lora_name="sql", extra_keys=[["sql", "pepper"]]),
            stored(5, lora_name="sql", extra_keys=[["sql"]], parent=4),
            stored(6, lora_name="sql", extra_keys=[["sql"]]),
            stored(7),
        )
        await follower.sees(1, 2, 3, 4, 5, 6, 7)
        namespaces = {
            event.block_hashes[0]: event.namespace for event in follower.events if isinstance(event, BlocksStored)
        }
        salted, both, adapter = namespace_of(None, "pepper"), namespace_of("sql", "pepper"), namespace_of("sql")
        assert namespaces == {1: salted, 3: "", 4: both, 5: adapter, 6: adapter, 7: ""}, "a parent says the rest"


async def test_blocks_that_tokens_do_not_identify_and_their_children_are_not_announced() -> None:
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        await publisher.publish(
            stored(1, 2, 3, extra_keys=[None, [b"embedding"], None]),
            stored(4, parent=3),
            stored(5, extra_keys=[[b"embedding"]]),
            removed(4, 2),
            stored(6, parent=1),
        )
        await follower.sees(1, 6)
        first = follower.events[1]
        assert isinstance(first, BlocksStored)
        assert list(unpack_tokens(first.tokens)) == [1, 2]
        assert not any(isinstance(event, BlocksEvicted) for event in follower.events)


async def test_an_images_identifier_stands_where_its_placeholders_begin() -> None:
    """As vLLM sends it: each block that an image touches names it, with its beginning relative to the block."""
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        cat, dog = [["cat", 1]], [["cat", -1], ["dog", 1]]
        await publisher.publish(
            stored(1, 2, 3, extra_keys=[cat, dog, [["dog", -1]]], token_ids=[5, 9, 9, 9, 9, 6]),
            stored(4, extra_keys=[[["cat", 0]]], token_ids=[8, 9], parent=3),
            stored(5, extra_keys=[[["cat", -2]]], token_ids=[9, 9], parent=4),
        )
        await follower.sees(1, 2, 3, 4, 5)
        tokens = [list(unpack_tokens(event.tokens)) for event in follower.events if isinstance(event, BlocksStored)]
        assert tokens == [[5, mark_of("cat"), 9, mark_of("dog"), 9, 6], [mark_of("cat"), 9], [9, 9]]


async def test_the_mark_is_behind_what_leads_in_to_the_placeholders() -> None:
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        await publisher.publish(stored(1, 2, extra_keys=[[["cat", 0]], [["cat", -2]]], token_ids=[7, 9, 9, 9]))
        await follower.sees(1, 2)
        event = follower.events[1]
        assert isinstance(event, BlocksStored)
        assert list(unpack_tokens(event.tokens)) == [7, mark_of("cat"), 9, 9]


async def test_salt_and_adapter_are_found_beside_an_image() -> None:
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        await publisher.publish(stored(1, lora_name="sql", extra_keys=[["sql", ["cat", 0], "pepper"]]))
        await follower.sees(1)
        event = follower.events[1]
        assert isinstance(event, BlocksStored)
        assert event.namespace == namespace_of("sql", "pepper")


async def test_blocks_before_a_hash_in_the_place_of_an_image_are_announced() -> None:
    """SGLang has hashes of 62 bits there, which no prompt that we see can be compared with."""
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        await publisher.publish(stored(1, 2, 3, token_ids=[5, 6, 7, 2**61, 2**62, 8]), stored(4, parent=3))
        await publisher.publish(stored(9))
        await follower.sees(1, 9)
        assert follower.stream.counters.malformed == 0


async def test_other_topics_that_begin_alike_are_ignored() -> None:
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        foreign = msgspec.msgpack.encode([1.0, [stored(66)], 0])
        await publisher.send(TOPIC.encode() + b"2", bytes(8), foreign)
        await publisher.publish(stored(1))
        await follower.sees(1)
        assert follower.starts == 1


async def test_cancelling_the_consumer_closes_the_stream() -> None:
    async with ScriptedPublisher() as publisher:
        follower = Follower(KvEventStream(REPLICA, publisher.endpoints))
        task = asyncio.create_task(follower.run())
        await publisher.subscribed()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert follower.stream.closed


async def test_a_cache_salt_told_beside_the_blocks_is_their_namespace() -> None:
    """As SGLang reports it; vLLM has it among the keys of the first block."""
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        await publisher.publish(stored(1, cache_salt="pepper"), stored(2))
        await follower.sees(1, 2)
        namespaces = {event.namespace for event in follower.events if isinstance(event, BlocksStored)}
        assert namespaces == {namespace_of(cache_salt="pepper"), ""}


async def test_many_streams_need_no_more_threads_than_one() -> None:
    async with ScriptedPublisher() as publisher:
        async with following(publisher):
            of_one = threading.active_count(), num_threads()
        async with AsyncExitStack() as stack:
            for _ in range(20):
                await stack.enter_async_context(following(publisher))
            assert (threading.active_count(), num_threads()) == of_one


async def test_a_stream_may_begin_as_soon_as_another_one_has_ended() -> None:
    """ZMQ frees what a socket has bound some time after it is closed."""
    for _ in range(500):
        Subscription(KvEventEndpoints("tcp://127.0.0.1:9")).close()


def num_threads() -> int:
    """Of this process, those of libraries too."""
    return len(list(Path("/proc/self/task").iterdir()))


async def test_other_tasks_go_on_while_a_large_message_is_decoded_and_applied() -> None:
    blocks = [range(start, start + 2 * 2_000, 2) for start in range(0, 30 * 10_000, 10_000)]
    turns = 0
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        await publisher.publish(*(stored(*names) for names in blocks))
        while not follower.cached:
            await asyncio.sleep(0)
            turns += 1
        await eventually(lambda: len(follower.cached) == 30 * 2_000, "all of it is applied")
    assert turns > 30, "at least one for each event in it"


@pytest.mark.parametrize("count", [3_000, 5_000, 12_000], ids=["at once", "in turns", "by a thread"])
async def test_a_message_of_any_size_is_applied_in_order(count: int) -> None:
    blocks = range(0, 2 * count, 2)
    payload = msgspec.msgpack.encode([0.0, [stored(*blocks), removed(0), removed(2)]])
    intake = EventIntake(REPLICA, reset_keeps_host=True)
    is_small, is_large = intake.is_small(KvMessage(0, payload)), len(payload) > LARGE_BYTES
    assert (is_small, is_large) == {3_000: (True, False), 5_000: (False, False), 12_000: (False, True)}[count]
    first, second = await intake.accept(KvMessage(0, payload))
    assert isinstance(first, BlocksStored) and first.block_hashes == tuple(blocks)
    assert isinstance(second, BlocksEvicted) and second.block_hashes == (0, 2)


async def test_a_thread_decodes_many_small_events_between_two_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM removes block by block, and a pause after each of them costs ten times as much as decoding it."""
    pauses: list[float] = []
    monkeypatch.setattr("preble.engines.kv_events.wire.time.sleep", pauses.append)
    payload = msgspec.msgpack.encode([0.0, [removed(block) for block in range(5_000)], 0])
    [run] = await decode_large(payload, pytest.fail)
    assert isinstance(run, WireRemoved) and len(run.block_hashes) == 5_000
    assert len(payload) / 32_000 < len(pauses) < len(payload) / 4_000


async def test_closing_ends_a_stream_that_waits_for_its_replica_at_once() -> None:
    async with ScriptedPublisher() as publisher:
        endpoints = publisher.endpoints
    follower = Follower(KvEventStream(REPLICA, endpoints, replay_timeout_s=1000.0))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follower.run())
        await eventually(lambda: follower.events != [], "begun")
        follower.stream.close()


async def test_events_that_cannot_be_had_are_lost_until_they_start_over() -> None:
    async with ScriptedPublisher() as publisher, TcpRelay(publisher.endpoints.endpoint) as relay:
        await publisher.publish(stored(1))
        await relay.cut()
        endpoints = dataclasses.replace(publisher.endpoints, endpoint=relay.address)
        follower = Follower(KvEventStream(REPLICA, endpoints, lost_after_s=0.05))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follower.run())
            await eventually(lambda: EventsLost(REPLICA) in follower.events, "they are lost")
            assert follower.events == [CacheCleared(REPLICA, is_past=True), EventsLost(REPLICA)]
            relay.mend()
            await follower.sees(1)
            assert follower.events[2:3] == [CacheCleared(REPLICA, is_past=True)]
            follower.stream.close()


def on_host(*blocks: int) -> dict[str, Any]:
    """Copies in the host's memory as vLLM announces them unless it is asked for more: by hash alone."""
    return stored(*blocks, medium="CPU") | {"token_ids": [], "block_size": 0}


async def test_demotions_of_one_message_are_one_and_keep_their_tier() -> None:
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        await publisher.publish(stored(1, 2, 3), on_host(2), on_host(1))
        await publisher.publish(removed(3), removed(2), removed(1), removed(2, medium="CPU"), stored(9))
        await follower.sees(1, 9)
        assert follower.events[2:5] == [
            BlocksEvicted(REPLICA, (3,)),
            BlocksDemoted(REPLICA, (2, 1), Tier.HOST),
            BlocksEvicted(REPLICA, (2,), Tier.HOST),
        ]
        assert follower.stream.counters.malformed == 0


async def test_a_block_in_engine_memory_needs_its_tokens() -> None:
    async with ScriptedPublisher() as publisher, following(publisher) as follower:
        await publisher.publish(on_host(1) | {"medium": "GPU"}, stored(2))
        await follower.sees(2)
        assert follower.stream.counters.malformed == 1
