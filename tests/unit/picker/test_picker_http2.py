"""HTTP/2 from the server's side, as bytes. That real peers understand it: tests/picker."""

from __future__ import annotations

import random

import pytest
from hpack import Encoder

from preble.picker.http2 import PREFACE, Code, Connection, ProtocolError, Status, Stream

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
PATH = "/service/Method"


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def message(content: bytes) -> bytes:
    return b"\0" + len(content).to_bytes(4, "big") + content


def settings(name: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, name.to_bytes(2, "big") + value.to_bytes(4, "big"))


class Peer:
    """A client's side by hand. `streams`: those that the connection has opened."""

    def __init__(self, greets: bool = True) -> None:
        self.streams: list[Stream] = []
        self.connection = Connection(self.streams.append, lambda: None)
        self.encoder = Encoder()
        if greets:
            self.connection.receive(PREFACE + frame(SETTINGS, 0, 0))
            self.frames()

    def headers(self) -> bytes:
        return bytes(self.encoder.encode([(":method", "POST"), (":path", PATH), ("te", "trailers")]))

    def open(self, stream_id: int = 1) -> Stream:
        self.connection.receive(frame(HEADERS, END_HEADERS, stream_id, self.headers()))
        return self.streams[-1]

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and payload of all that the connection has put out."""
        output, found = self.connection.take_output(), []
        while output:
            length = int.from_bytes(output[:3], "big")
            found.append((output[3], output[4], int.from_bytes(output[5:9], "big"), output[9 : 9 + length]))
            output = output[9 + length :]
        return found

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
    (headers, _, _, _), (data, _, _, payload), (trailers, flags, _, block) = peer.frames()
    assert (headers, data, trailers) == (HEADERS, DATA, HEADERS) and payload == message(b"answer")
    assert flags == END_HEADERS | END_STREAM and b"grpc-status" in block
    assert peer.connection.streams == {}


@pytest.mark.parametrize("seed", range(5))
def test_messages_are_found_however_the_bytes_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    sent = [rng.randbytes(rng.choice((0, 1, 5, 300, 40_000))) for _ in range(30)]
    stream_bytes = b"".join(map(message, sent))
    peer = Peer(greets=False)
    encoded = PREFACE + frame(SETTINGS, 0, 0)
    block = peer.headers()
    encoded += frame(HEADERS, 0, 1, block[:3]) + frame(CONTINUATION, END_HEADERS, 1, block[3:])
    while stream_bytes:
        size = rng.randrange(1, 16_000)
        padding = rng.randrange(200)
        payload = bytes((padding,)) + stream_bytes[:size] + bytes(padding)
        encoded += frame(DATA, PADDED, 1, payload)
        stream_bytes = stream_bytes[size:]
    found = []
    while encoded:
        size = rng.choice((1, 8, 9, 10, 5_000, 60_000))
        peer.connection.receive(encoded[:size])
        encoded = encoded[size:]
        while peer.streams and peer.streams[0].messages:
            found.append(peer.streams[0].take())
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
    peer = Peer()
    stream = peer.open()
    with pytest.raises(ProtocolError) as flood:
        for _ in range(200):
            peer.connection.receive(frame(DATA, 0, 1, message(bytes(16_000))))
    assert flood.value.code is Code.FLOW_CONTROL_ERROR

    peer = Peer()
    stream = peer.open()
    room, taken = 2**20, 0
    for _ in range(500):
        size = len(message(bytes(16_000)))
        if room < size:
            taken += len(stream.take())
        else:
            peer.connection.receive(frame(DATA, 0, 1, message(bytes(16_000))))
            room -= size
        room += sum(int.from_bytes(p, "big") for kind, _, sid, p in peer.frames() if (kind, sid) == (WINDOW_UPDATE, 1))
    assert taken > 2_000_000


def test_a_reset_and_what_comes_after_it_is_of_no_account() -> None:
    peer = Peer()
    stream = peer.open()
    peer.connection.receive(frame(RST_STREAM, 0, 1, bytes(4)))
    assert stream.is_reset and stream.is_over
    peer.connection.receive(frame(DATA, 0, 1, message(b"late")) + frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1"))
    assert peer.frames() == []


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
    assert kinds == [GOAWAY, RST_STREAM, HEADERS, DATA] and len(peer.streams) == 1


def test_an_error_has_its_status_and_its_text() -> None:
    peer = Peer()
    peer.open().close(Status.NOT_FOUND, "nö such thing")
    [(kind, flags, _, block), (reset, _, _, _)] = peer.frames()
    assert (kind, flags, reset) == (HEADERS, END_HEADERS | END_STREAM, RST_STREAM)
    assert b"n%C3%B6 such thing" in block and b"\x015" in block


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
        frame(HEADERS, 0, 1, b"\x82") + 9 * frame(CONTINUATION, 0, 1, bytes(10_000)),
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
    with pytest.raises(ProtocolError):
        peer.connection.receive(wrong)
    assert peer.frames()[-1][0] == GOAWAY


@pytest.mark.parametrize("broken", [b"\x01\0\0\0\1x", b"\0\x7f\xff\xff\xff"])
def test_messages_that_are_compressed_or_endless_end_the_connection(broken: bytes) -> None:
    peer = Peer()
    peer.open()
    with pytest.raises(ProtocolError):
        peer.connection.receive(frame(DATA, 0, 1, broken))


def test_something_else_than_http2_is_refused_at_once() -> None:
    with pytest.raises(ProtocolError, match="not HTTP/2"):
        Peer(greets=False).connection.receive(b"GET / HTTP/1.1\r\n\r\n")


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
