"""The fast way to read KV events says what the strict one says, or leaves a message to it."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from preble.core.types import PackedHashes, unpack_tokens
from preble.engines.kv_events.packed import packed_events
from preble.engines.kv_events.wire import Malformed, UnknownEvent, WireEvent, WireRemoved, WireStored, decode_batch

SIZE = 2
unsigned, signed = st.integers(0, 2**64 - 1), st.integers(-(2**63), -(2**31) - 1) | st.integers(0, 2**63 - 1)
tokens = st.sampled_from([0, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1])
odd = st.sampled_from(
    [None, True, -1, 1.5, "GPU", "CPU", b"GPU", [], [None], {}, 2**31, 2**32, 2**64 - 1, [2**31, 2**32 - 1], "x" * 40]
)
fields = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "medium", "extra_keys", "group_idx", "type"]


@st.composite
def usual_events(draw: st.DrawFn, numbers: st.SearchStrategy[int]) -> dict[str, Any]:
    hashes = draw(st.lists(numbers, min_size=1, max_size=3))
    shared: dict[str, Any] = {"medium": draw(st.sampled_from(["GPU", None])), "group_idx": draw(st.integers(0, 300))}
    if draw(st.booleans()):
        return {"type": "BlockRemoved", "block_hashes": hashes[:1]} | shared
    stored = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": draw(st.none() | numbers)}
    stored |= {"token_ids": draw(st.lists(tokens, min_size=SIZE * len(hashes), max_size=SIZE * len(hashes)))}
    stored |= {"block_size": SIZE, "lora_id": None, "lora_name": draw(st.sampled_from([None, "sql"]))}
    stored |= {"extra_keys": draw(st.sampled_from([None, [None] * len(hashes)])), "of_a_later_version": draw(tokens)}
    return stored | {"kv_cache_spec_kind": "full_attention"} | shared


@st.composite
def odd_events(draw: st.DrawFn) -> dict[str, Any]:
    return draw(usual_events(unsigned | signed)) | {draw(st.sampled_from(fields)): draw(odd)}


cleared = st.just({"type": "AllBlocksCleared"})
messages = st.builds(
    lambda events: msgspec.msgpack.encode([1.5, events, 0]),
    st.lists(usual_events(unsigned) | cleared) | st.lists(usual_events(signed) | cleared),
)
odd_messages = st.builds(
    lambda head, events, tail: msgspec.msgpack.encode([head, events, *tail]),
    st.sampled_from([0.0, 1, None]),
    st.lists(usual_events(signed) | odd_events() | cleared | odd, max_size=4) | odd,
    st.lists(odd, max_size=2),
)


def same_form(event: WireEvent) -> object:
    """An event with its packed parts as lists."""
    form = msgspec.structs.asdict(event)
    if isinstance(event, WireStored):
        form["token_ids"] = list(
            unpack_tokens(event.token_ids) if isinstance(event.token_ids, bytes) else event.token_ids
        )
        form["extra_keys"] = None if not any(event.extra_keys or ()) else event.extra_keys
    if isinstance(event, WireStored | WireRemoved):
        form["block_hashes"] = list(event.block_hashes)
    return type(event), form


def strictly_read(payload: bytes) -> tuple[list[object], list[Malformed | UnknownEvent]]:
    bad: list[Malformed | UnknownEvent] = []
    return [same_form(event) for event in decode_batch(payload, bad.append)], bad


def check(payload: bytes) -> None:
    packed = packed_events(payload)
    if packed is not None:
        assert ([same_form(event) for event in packed], []) == strictly_read(payload)


@given(messages)
def test_usual_messages_are_read_fast_and_alike(payload: bytes) -> None:
    assert packed_events(payload) is not None
    check(payload)


@given(odd_messages)
def test_odd_messages_are_read_alike_or_not_at_all(payload: bytes) -> None:
    check(payload)


@given(messages, st.data())
def test_damaged_messages_are_read_alike_or_not_at_all(payload: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(payload) - 1))
    check(payload[:at])
    check(payload[:at] + data.draw(st.binary(max_size=3)) + payload[at + data.draw(st.integers(0, 3)) :])


@given(st.lists(unsigned) | st.lists(signed))
def test_packed_hashes_are_as_a_tuple_of_them(hashes: list[int]) -> None:
    payload = msgspec.msgpack.encode([1.5, [{"type": "BlockRemoved", "block_hashes": hashes}]])
    [event] = packed_events(payload) or []
    assert isinstance(event, WireRemoved) and isinstance(event.block_hashes, PackedHashes)
    packed, plain = event.block_hashes, tuple(hashes)
    assert packed == plain and hash(packed) == hash(plain) and repr(packed) == repr(plain)
    assert packed[1:] == plain[1:] and list(packed) == hashes and packed != (*plain, 1)
