from __future__ import annotations

import tracemalloc

import pytest

from preble.gateway.http.events import DONE, EventSplitter, event, looks_like_events
from preble.prompts.endpoints import COMPLETIONS, StreamMeter

USAGE = (
    b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 42,'
    b' "prompt_tokens_details": {"cached_tokens": 8}}}'
)
STREAM = event(b'{"a": "\\ndata: no event"}') * 5 + event(b"{}")


def metered(raw: bytes, size: int) -> StreamMeter:
    meter = COMPLETIONS.meter()
    for i in range(0, len(raw), size):
        meter.feed(raw[i : i + size])
    return meter


@pytest.mark.parametrize("first", [b"d", b"data", b"\n", b": ping\n\n", b"  data: {}", b"event: x\n", b"id"])
def test_a_stream_may_begin_with_any_piece_of_an_event(first: bytes) -> None:
    assert looks_like_events(first)


@pytest.mark.parametrize("first", [b"", b"<html>", b"dat\n", b"{}", b"\xff"])
def test_what_no_event_begins_with_is_no_stream(first: bytes) -> None:
    assert not looks_like_events(first)


@pytest.mark.parametrize("size", [1000, 61, 34, 20, 8, 7, 6, 5])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_events_are_counted_without_the_final_done(line_end: bytes, size: int) -> None:
    assert metered((STREAM + DONE).replace(b"\n", line_end), size).tokens()[0] == 6


def test_a_stream_that_was_cut_off_counts_what_came() -> None:
    assert metered(STREAM, 1000).tokens()[0] == 6
    assert metered(b"", 1).tokens()[0] == 0


@pytest.mark.parametrize("size", [1000, 150])
def test_reported_usage_goes_before_counting(size: int) -> None:
    meter = metered(STREAM + event(USAGE) + DONE, size)
    usage = meter.usage()
    assert usage is not None and usage.cached_tokens == 8
    assert meter.tokens()[0] == 42


@pytest.mark.parametrize("odd", [b'{"usage": null}', b'{"usage": 3}', b'{"usage": {', b'"usage"', b'{"text": "usage"}'])
def test_an_odd_usage_is_none(odd: bytes) -> None:
    meter = metered(STREAM + event(odd) + DONE, 1000)
    assert meter.usage() is None
    assert meter.tokens()[0] == 7


@pytest.mark.parametrize("size", range(1, 12))
def test_a_stream_is_cut_into_the_same_events_however_it_arrives(size: int) -> None:
    raw = b"data: 1\n\n: comment\n\nevent: x\r\ndata: 2\r\ndata: 3\r\n\r\ndata:4\n\ndata: rest"
    splitter = EventSplitter()
    found = [data for i in range(0, len(raw), size) for data in splitter.feed(raw[i : i + size])]
    assert found == [b"1", b"2\n3", b"4"]


def test_a_piece_of_a_long_event_costs_no_copy_of_what_came_before() -> None:
    splitter = EventSplitter()
    for piece in (b"data: " + bytes(1_000_000), b"x"):
        splitter.feed(piece)
    tracemalloc.start()
    try:
        for _ in range(10):
            assert splitter.feed(b"x\n") == []
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 100_000
