"""gRPC over HTTP/2 from the server's side, as bytes. That real peers understand it: tests/picker."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator

import pytest
from h2.errors import ErrorCodes
from hpack import Decoder, Encoder

from preble.picker.http2 import (
    FIRST_MESSAGE_TICKS,
    GREETING_TICKS,
    MOST_EARLY_RESETS,
    MOST_MESSAGE_BYTES,
    MOST_STREAMS,
    UNUSED_TICKS,
    Connection,
    Http2Stream,
    ProtocolError,
    Status,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
PATH = "/service/Method"


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def message(content: bytes, length: int | None = None) -> bytes:
    return b"\0" + (len(content) if length is None else length).to_bytes(4, "big") + content


def settings(name: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, name.to_bytes(2, "big") + value.to_bytes(4, "big"))


def frames_of(output: bytes) -> list[tuple[int, int, int, bytes]]:
    """Kind, flags, stream and payload of each frame."""
    found = []
    while output:
        length = int.from_bytes(output[:3], "big")
        found.append((output[3], output[4], int.from_bytes(output[5:9], "big"), output[9 : 9 + length]))
        output = output[9 + length :]
    return found


class Peer:
    """A client's side by hand. `streams`: those that the connection has opened."""

    def __init__(self, greets: bool = True) -> None:
        self.streams: list[Http2Stream] = []
        self.connection = Connection(self.streams.append, lambda: None)
        self.encoder = Encoder()
        self.decoder = Decoder()
        if greets:
            self.connection.receive(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0))
            self.frames()

    def headers(self) -> bytes:
        pairs = [(":method", "POST"), (":path", PATH), (":scheme", "http"), (":authority", "a"), ("te", "trailers")]
        return bytes(self.encoder.encode(pairs))

    def open(self, stream_id: int = 1) -> Http2Stream:
        self.connection.receive(frame(HEADERS, END_HEADERS, stream_id, self.headers()))
        return self.connection.streams[stream_id]

    def trailers(self, block: bytes) -> dict[str, str]:
        return dict(self.decoder.decode(block))

    def room(self, stream_id: int) -> int:
        """What updates of a window add up to."""
        found = (payload for kind, _, number, payload in self.frames() if (kind, number) == (WINDOW_UPDATE, stream_id))
        return sum(int.from_bytes(payload, "big") for payload in found)

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """All that the connection has put out."""
        return frames_of(self.connection.take_output())

    def data(self) -> bytes:
        return b"".join(payload for kind, _, _, payload in self.frames() if kind == DATA)


def test_a_call_is_read_and_answered() -> None:
    peer = Peer()
    stream = peer.open()
    assert stream.path == PATH and not stream.is_over
    peer.connection.receive(frame(DATA, END_STREAM, 1, message(b"question")))
    assert stream.take() == b"question" and stream.is_over
    stream.send(b"answer")
    stream.close()
    assert peer.streams == [stream]
    (headers, _, _, head), (data, _, _, payload), (trailers, flags, _, block) = peer.frames()
    assert (headers, data, trailers) == (HEADERS, DATA, HEADERS) and payload == message(b"answer")
    assert peer.trailers(head) == {":status": "200", "content-type": "application/grpc"}
    assert flags == END_HEADERS | END_STREAM and peer.trailers(block) == {"grpc-status": "0"}
    assert peer.connection.streams == {}


@pytest.mark.parametrize("seed", range(5))
def test_messages_are_found_however_the_bytes_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    sent = [rng.randbytes(rng.choice((0, 1, 5, 300, 3_000))) for _ in range(30)]
    peer = Peer()
    encoded, block = b"", peer.headers()
    encoded += frame(HEADERS, 0, 1, block[:3]) + frame(CONTINUATION, END_HEADERS, 1, block[3:])
    for stream_bytes in map(message, sent):
        while stream_bytes:
            size = rng.randrange(1, 1_000)
            padding = rng.randrange(200)
            encoded += frame(DATA, PADDED, 1, bytes((padding,)) + stream_bytes[:size] + bytes(padding))
            stream_bytes = stream_bytes[size:]
    found = []
    while encoded:
        size = rng.choice((1, 8, 9, 10, 5_000))
        peer.connection.receive(encoded[:size])
        encoded = encoded[size:]
        while peer.streams and peer.streams[0].messages:
            found.append(peer.streams[0].take())
        peer.frames()
    assert found == sent


def test_no_more_is_sent_than_the_peer_has_room_for() -> None:
    peer = Peer()
    peer.connection.receive(settings(4, 10))
    stream = peer.open()
    stream.send(bytes(20))
    stream.close()
    assert len(peer.data()) == 10 and stream.num_pending == 15
    peer.connection.receive(frame(WINDOW_UPDATE, 0, 1, (7).to_bytes(4, "big")))
    assert len(peer.data()) == 7
    peer.connection.receive(settings(4, 1000))
    last = peer.frames()
    assert sum(len(payload) for kind, _, _, payload in last if kind == DATA) == 8
    assert last[-2][:2] == (HEADERS, END_HEADERS | END_STREAM), "the end comes behind all data"


def test_a_peer_with_room_for_all_is_sent_a_piece_at_a_time_and_the_rest_counts_as_held() -> None:
    peer, size = Peer(), 1_000_000
    peer.connection.receive(settings(4, 2**31 - 1) + frame(WINDOW_UPDATE, 0, 0, (2**30).to_bytes(4, "big")))
    stream = peer.open()
    stream.send(bytes(size))
    sent = len(peer.data())
    assert 0 < sent < size / 4 and peer.connection.held >= size - sent
    while piece := peer.data():
        sent += len(piece)
    assert sent == size + 5


def test_the_connections_window_holds_for_all_streams_together() -> None:
    peer = Peer()
    peer.connection.receive(settings(4, 2**20))
    first, second = peer.open(1), peer.open(3)
    first.send(bytes(60_000))
    second.send(bytes(60_000))
    assert len(peer.data()) == 65_535
    peer.connection.receive(frame(WINDOW_UPDATE, 0, 0, (100_000).to_bytes(4, "big")))
    assert len(peer.data()) == 120_010 - 65_535


def test_a_stream_that_is_not_read_is_held_up_and_goes_on_when_it_is() -> None:
    short = message(bytes(995))
    peer = Peer()
    peer.open()
    with pytest.raises(ProtocolError) as flood:
        for _ in range(100):
            peer.connection.receive(frame(DATA, 0, 1, short))
    assert flood.value.code is ErrorCodes.FLOW_CONTROL_ERROR

    peer = Peer()
    stream = peer.open()
    room, taken = 16 * 1024, 0
    for _ in range(500):
        if room < len(short):
            taken += len(stream.take())
        else:
            peer.connection.receive(frame(DATA, 0, 1, short))
            room -= len(short)
        room += peer.room(1)
    assert taken > 200_000


def long_message(peer: Peer, stream_id: int, size: int) -> Iterator[int]:
    """Send a message as far as the window allows, and say each time how much is to come."""
    rest, room = message(bytes(size)), 16 * 1024
    while rest:
        piece, rest = rest[: min(room, 16_384)], rest[min(room, 16_384) :]
        room -= len(piece)
        peer.connection.receive(frame(DATA, 0, stream_id, piece))
        if not room:
            yield len(rest)
            room += peer.room(stream_id)


def test_a_long_message_gets_all_its_room_at_once() -> None:
    peer = Peer()
    stream = peer.open()
    for _ in range(3):
        assert len(list(long_message(peer, 1, 2_000_000))) == 2, "at the window's end and, by chance, the message's"
        assert len(stream.take()) == 2_000_000
        assert peer.room(1) == 16 * 1024, "and no more than before in the end"
    assert peer.connection.held == 8 * 1024


def test_long_messages_take_turns_so_that_one_can_be_finished() -> None:
    peer = Peer()
    first, second = peer.open(1), peer.open(3)
    begun = message(bytes(MOST_MESSAGE_BYTES))
    for number in (1, 3):
        peer.connection.receive(frame(DATA, 0, number, begun[:16_384]))
    updates = [(number, int.from_bytes(p, "big")) for kind, _, number, p in peer.frames() if kind == WINDOW_UPDATE]
    assert updates == [(1, len(begun) - 16_384)], "the second waits"
    assert not second.messages
    for start in range(16_384, len(begun), 16_384):
        peer.connection.receive(frame(DATA, 0, 1, begun[start : start + 16_384]))
    assert len(first.take()) == MOST_MESSAGE_BYTES
    assert peer.room(3) == len(begun) - 16_384


def test_a_long_message_whose_stream_is_reset_leaves_its_turn_to_the_next() -> None:
    peer = Peer()
    begun = message(bytes(100), length=MOST_MESSAGE_BYTES)
    for number in (1, 3, 5):
        peer.open(number)
        peer.connection.receive(frame(DATA, 0, number, begun))
    assert peer.room(1) > 0
    peer.connection.receive(frame(RST_STREAM, 0, 3, bytes(4)) + frame(RST_STREAM, 0, 1, bytes(4)))
    assert peer.room(5) > 0


def test_a_reset_and_what_comes_after_it_is_of_no_account() -> None:
    peer = Peer()
    stream = peer.open()
    peer.connection.receive(frame(RST_STREAM, 0, 1, bytes(4)))
    assert stream.is_reset and stream.is_over
    peer.connection.receive(frame(DATA, 0, 1, message(b"late")) + frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1"))
    assert not stream.messages and [kind for kind, *_ in peer.frames()] == [RST_STREAM]


def test_pings_are_answered_and_unknown_frames_passed_by() -> None:
    peer = Peer()
    peer.connection.receive(frame(PING, 0, 0, b"12345678") + frame(77, 0, 0, b"?") + frame(PING, ACK, 0, b"12345678"))
    assert peer.frames() == [(PING, ACK, 0, b"12345678")]


def test_a_server_that_leaves_refuses_further_streams_and_serves_the_others() -> None:
    peer = Peer()
    stream = peer.open()
    peer.connection.leave()
    peer.connection.receive(frame(HEADERS, END_HEADERS, 3, peer.headers()))
    stream.send(b"still")
    kinds = [kind for kind, _, _, _ in peer.frames()]
    assert kinds == [GOAWAY, RST_STREAM, HEADERS, DATA] and list(peer.connection.streams) == [1]


def test_an_error_has_its_status_and_its_text() -> None:
    peer = Peer()
    peer.open().close(Status.NOT_FOUND, "nö such thing")
    [(kind, flags, _, block), (reset, _, _, _)] = peer.frames()
    assert (kind, flags, reset) == (HEADERS, END_HEADERS | END_STREAM, RST_STREAM)
    assert peer.trailers(block)["grpc-message"] == "n%C3%B6 such thing" and peer.trailers(block)["grpc-status"] == "5"


@pytest.mark.parametrize(
    "wrong",
    [
        frame(DATA, 0, 1, b"x" * 16_385),
        frame(DATA, 0, 5, b""),
        frame(HEADERS, END_HEADERS, 2, b"\x82"),
        frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"),
        frame(HEADERS, PADDED | END_HEADERS, 1, b"\xff"),
        frame(HEADERS, 0, 1, b"\x82") + frame(PING, 0, 0, bytes(8)),
        frame(CONTINUATION, END_HEADERS, 1, b"\x82"),
        frame(HEADERS, 0, 1, b"\x82") + 90 * frame(CONTINUATION, 0, 1, bytes(10_000)),
        frame(PING, 0, 0, b"short"),
        frame(SETTINGS, 0, 0, b"12345"),
        settings(4, 2**31),
        settings(5, 5),
        frame(WINDOW_UPDATE, 0, 0, bytes(4)),
        frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"),
        frame(5, 0, 1, bytes(4)),
    ],
)
def test_a_peer_that_breaks_the_protocol_hears_so_and_is_left(wrong: bytes) -> None:
    peer = Peer()
    with pytest.raises(ProtocolError) as error:
        peer.connection.receive(wrong)
    assert frames_of(peer.connection.close(error.value.code))[-1][0] == GOAWAY


@pytest.mark.parametrize(
    ("broken", "status"),
    [(b"\x01\0\0\0\1x", Status.INTERNAL), (b"\0\x7f\xff\xff\xff", Status.RESOURCE_EXHAUSTED)],
)
def test_messages_that_are_compressed_or_endless_end_their_call(broken: bytes, status: Status) -> None:
    peer = Peer()
    peer.open(1)
    peer.open(3)
    peer.connection.receive(frame(DATA, 0, 1, broken))
    [(kind, _, number, block), _] = peer.frames()
    assert (kind, number) == (HEADERS, 1) and peer.trailers(block)["grpc-status"] == str(int(status))
    assert list(peer.connection.streams) == [3]


def test_something_else_than_http2_is_refused_at_once() -> None:
    with pytest.raises(ProtocolError, match="preamble"):
        Peer(greets=False).connection.receive(b"GET / HTTP/1.1\r\n\r\n")


# what one peer may take


def test_a_stream_costs_nothing_until_its_first_message() -> None:
    peer = Peer()
    peer.open()
    assert peer.streams == []
    peer.connection.receive(frame(DATA, END_STREAM, 1))
    assert [stream.id for stream in peer.streams] == [1], "or its end"


def test_streams_beyond_the_limit_are_refused_before_the_peer_knows_it() -> None:
    peer = Peer(greets=False)
    peer.connection.receive(PREFACE + frame(SETTINGS, 0, 0))
    for number in range(1, 2 * MOST_STREAMS + 20, 2):
        peer.connection.receive(frame(HEADERS, END_HEADERS, number, peer.headers()))
    refused = [payload for kind, _, _, payload in peer.frames() if kind == RST_STREAM]
    assert refused == [ErrorCodes.REFUSED_STREAM.to_bytes(4, "big")] * 10
    assert len(peer.connection.streams) == MOST_STREAMS


def test_streams_that_clients_give_up_are_no_attack() -> None:
    peer = Peer()
    for number in range(1, 2 * MOST_STREAMS, 2):
        peer.open(number).send(b"answer")
    peer.frames()
    for number in range(1, 2 * MOST_STREAMS, 2):
        peer.connection.receive(frame(RST_STREAM, 0, number, bytes(4)))
    assert peer.connection.held == 0

    for number in range(2 * MOST_STREAMS + 1, 4 * MOST_STREAMS, 2):
        peer.open(number)
    peer.connection.tick()
    for number in range(2 * MOST_STREAMS + 1, 4 * MOST_STREAMS, 2):
        peer.connection.receive(frame(RST_STREAM, 0, number, bytes(4)))


def test_streams_that_are_opened_and_reset_are_one() -> None:
    peer = Peer()
    with pytest.raises(ProtocolError) as error:
        for number in range(1, 2 * MOST_EARLY_RESETS + 10, 2):
            peer.open(number)
            peer.connection.receive(frame(RST_STREAM, 0, number, bytes(4)))
    assert error.value.code is ErrorCodes.ENHANCE_YOUR_CALM


def test_a_peer_that_pings_now_and_then_is_served_for_ever() -> None:
    peer = Peer()
    peer.open()
    peer.connection.receive(frame(DATA, 0, 1, message(b"")))
    for _ in range(5_000):
        peer.connection.receive(frame(PING, 0, 0, b"12345678"))
        peer.connection.tick()


def ticks_until_the_end(peer: Peer) -> int:
    for number in range(10_000):
        try:
            peer.connection.tick()
        except ProtocolError:
            return number + 1
    raise AssertionError("no end")


def test_connections_that_do_not_greet_or_are_not_used_end() -> None:
    assert ticks_until_the_end(Peer(greets=False)) == GREETING_TICKS
    assert ticks_until_the_end(Peer()) == UNUSED_TICKS


def test_a_call_without_a_message_ends() -> None:
    peer = Peer()
    peer.open(1)
    peer.connection.tick()
    peer.open(3)
    peer.connection.receive(frame(DATA, 0, 3, message(b"")))
    for _ in range(FIRST_MESSAGE_TICKS):
        peer.connection.tick()
    found = peer.frames()
    assert [(kind, number) for kind, _, number, _ in found] == [(HEADERS, 1), (RST_STREAM, 1)]
    assert peer.trailers(found[0][3])["grpc-status"] == "4" and list(peer.connection.streams) == [3]


def test_all_that_is_held_is_counted_and_forgotten_at_the_end() -> None:
    peer = Peer()
    peer.connection.receive(settings(4, 10))
    for number in (1, 3, 5):
        peer.open(number).send(bytes(1_000))
        peer.connection.receive(frame(DATA, 0, number, message(bytes(300), length=5_000)))
    peer.frames()
    assert peer.connection.held == 3 * (8 * 1024 + 305 + 995)
    peer.connection.receive(frame(RST_STREAM, 0, 1, bytes(4)))
    assert peer.connection.held == 2 * (8 * 1024 + 305 + 995)
    peer.connection.close(None)
    assert peer.connection.held == 0


def test_what_has_ended_is_freed_without_a_garbage_collection() -> None:
    gc.disable()
    try:
        peer = Peer()
        for number in (1, 3):
            peer.open(number)
            peer.connection.receive(frame(DATA, 0, number, message(b"question")))
        freed = [weakref.ref(peer.connection._h2), *map(weakref.ref, peer.connection._h2.streams.values())]
        peer.connection.close(ErrorCodes.NO_ERROR)
        peer = Peer()
        assert [one() for one in freed] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_raise_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        peer = Peer()
        peer.open()
        try:
            for _ in range(5):
                kind, flags = rng.randrange(11), rng.randrange(256)
                peer.connection.receive(frame(kind, flags, rng.choice((0, 1, 3)), rng.randbytes(rng.randrange(30))))
        except ProtocolError:
            pass


def cut_short(whole: bytes) -> bytes:
    """What a peer sends of a message at once, before it has our settings: 20,000 bytes of its first window."""
    return b"".join(frame(DATA, 0, 1, whole[at : at + 10_000]) for at in (0, 10_000))


@pytest.mark.parametrize("size", [20_000, 60_000, 100_000, MOST_MESSAGE_BYTES])
def test_a_long_message_that_begins_before_the_peer_has_our_settings_gets_its_room(size: int) -> None:
    peer = Peer(greets=False)
    opening = frame(HEADERS, END_HEADERS, 1, peer.headers())
    peer.connection.receive(PREFACE + frame(SETTINGS, 0, 0) + opening + cut_short(message(bytes(size))))
    room = 65_535 + peer.room(1) - 20_000
    room -= 65_535 - 16 * 1024  # the settings
    peer.connection.receive(frame(SETTINGS, ACK, 0))
    assert room + peer.room(1) >= 5 + size - 20_000


def test_padding_takes_no_room_from_a_long_message() -> None:
    peer = Peer()
    peer.open()
    missing, room = message(bytes(40_000)), 16 * 1024
    for _ in range(38):
        peer.connection.receive(frame(DATA, PADDED, 1, b"\x64" + missing[:1_000] + bytes(100)))
        missing, room = missing[1_000:], room - 1_101 + peer.room(1)
        assert room >= len(missing)
    assert len(missing) == 2_005


def test_what_has_come_of_a_frame_is_not_held_when_the_connection_is_over() -> None:
    peer = Peer()
    peer.connection.receive(frame(DATA, 0, 1, bytes(10_000))[:9_000])
    assert peer.connection.held == 9_000
    peer.connection.close()
    assert peer.connection.held == 0


def test_a_peer_that_is_left_need_not_be_told_that_the_server_leaves() -> None:
    peer = Peer()
    peer.connection.close(ErrorCodes.ENHANCE_YOUR_CALM)
    peer.connection.leave()
    assert peer.connection.take_output() == b""


def test_a_peer_that_goes_on_with_a_stream_that_it_has_reset_is_left() -> None:
    peer = Peer()
    peer.open()
    peer.connection.receive(frame(RST_STREAM, 0, 1, bytes(4)))
    with pytest.raises(ProtocolError, match="carry nothing"):
        for _ in range(3):
            assert peer.connection.receive(frame(DATA, 0, 1) * 1_000) >= 1_000
