"""Packets between gateways: whoever reads one trusts nothing."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble.core.types import PeerId, Placement, Reason, ReplicaId, Request, RequestId
from preble.core.types.events import PeerReported, RequestPlaced
from preble.core.types.life import TRANSFERRED, Ended, FirstToken, Outcome
from preble.peers import member
from preble.peers.packets import (
    MAX_PACKET_BYTES,
    VERSION,
    Again,
    BadPacket,
    Beat,
    Ejected,
    Held,
    Left,
    Message,
    PlacedRequest,
    RequestReport,
    Tokens,
    Unknown,
    Used,
    decode,
    encode,
    split,
)

EAST = PeerId("east")
MESSAGES: tuple[Message, ...] = (
    Tokens(b"h" * 16, b"1234"),
    PlacedRequest(1, "r0", 100, None, b"", b"12345678", "salted"),
    PlacedRequest(2, "r0", 100, 16, b"", b"12345678", "", "r1"),
    RequestReport(2, TRANSFERRED),
    Held("r0", b"h" * 16, b"1234", "salted"),
    RequestReport(1, FirstToken()),
    RequestReport(1, Ended(output_tokens=20, cached_tokens=16)),
    Beat(5, (1, 2), (3,), ("west",)),
    Again("west", (1, 2)),
    Unknown((b"h" * 16,)),
    Ejected("r0"),
    Used((("a key", 3, 500),), (("a tenant", 0.25),)),
    Left(),
)


def test_every_message_arrives_as_it_was_sent() -> None:
    packet = decode(encode(EAST, 7, MESSAGES))
    assert (packet.sender, packet.number, packet.messages) == (EAST, 7, MESSAGES)


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        ([VERSION + 1, "a new form"], f"version {VERSION + 1}; this gateway speaks version {VERSION}"),
        ([VERSION, [b"short"], b""], "length"),
        ([VERSION, [b"m" * 16] * 5, b""], "length"),
        ([VERSION, "east", [["f", 1]]], "Expected `array`"),
        ({"version": VERSION}, "array"),
    ],
)
def test_an_envelope_that_is_none_says_why(packet: object, why: str) -> None:
    with pytest.raises(BadPacket, match=why):
        split(msgspec.msgpack.encode(packet))


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (["", 1, []], "length"),
        (["east", -1, []], ">= 0"),
        (["east", 1, [["r", -1, {"fact": "first_token"}]]], ">= 0"),
        (["east", 1, [["r", "1", {"fact": "first_token"}]]], "int"),
        (["east", 1, [["?", 1]]], "Invalid value"),
        (["east", 1, [["r", 1, {"fact": "moved", "replica_id": "a"}]]], "Invalid value"),
        (["east", 1, [["r", 1, {"fact": "ended", "output_tokens": -1}]]], ">= 0"),
        (["east", 1, [["p", 1, "r0", 10, None, b"", b"123"]]], "no multiple of 4 bytes"),
        (["east", 1, [["u", [b"h" * 17]]]], "length"),
        (["east", 1, [["s", [["alice", 1, -1]], []]]], ">= 0"),
        (["east", 1, [["s", [], [["alice", -0.5]]]]], ">= 0"),
        (["east", 1, [["s", [], [["alice", float("nan")]]]]], ">= 0"),
        ({"version": 1}, "array"),
    ],
)
def test_a_packet_that_is_none_says_why(packet: object, why: str) -> None:
    with pytest.raises(BadPacket, match=why):
        decode(msgspec.msgpack.encode(packet))


def test_a_packet_that_is_too_deep_is_refused() -> None:
    deep = b"\x91" * 100_000 + b"\xc0"
    for read, head in ((split, [VERSION, [], b""]), (decode, ["east", 1, []])):
        packet = b"\x94" + msgspec.msgpack.encode(head)[1:] + deep  # a fourth part, as a later version may have
        with pytest.raises(BadPacket, match="recursion"):
            read(packet)


def test_a_packet_that_is_too_large_is_not_read() -> None:
    with pytest.raises(BadPacket, match="at most"):
        split(b"\0" * (MAX_PACKET_BYTES + 1))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_packet_or_refused(data: bytes) -> None:
    for read in (split, decode):
        with suppress(BadPacket):
            read(data)


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_packet_is_a_packet_or_refused(at: int, byte: int) -> None:
    data = bytearray(encode(EAST, 1, MESSAGES))
    data[at % len(data)] = byte
    with suppress(BadPacket):
        decode(bytes(data))


class NothingHere:
    """A scheduler without replicas. `assumed`: what it was to assume."""

    def __init__(self) -> None:
        self.assumed: list[object] = []

    def assume(self, event: object, now: float) -> bool:
        self.assumed.append(event)
        return False


def test_what_exceeds_the_limit_of_a_peer_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "MOST_IN_FLIGHT", 2)  # ships 200,000
    sent: list[Message] = []
    me = member.GroupMember(PeerId("me"), cast(Any, NothingHere()), sent.append)
    for _ in range(2):
        me.receive(PeerId("peer"), Beat(9, (1, 2, 3), (), ("me",)), 0.0)
        for number in (1, 2, 3):
            me.receive(PeerId("peer"), PlacedRequest(number, "r", 1, None, b"", b"", ""), 0.0)
    assert [message for message in sent if isinstance(message, Again)] == [Again("peer", (1, 2))]


def test_what_a_peer_writes_about_an_error_goes_no_further() -> None:
    scheduler = NothingHere()
    me = member.GroupMember(PeerId("me"), cast(Any, scheduler), lambda message: None)
    me.receive(EAST, RequestReport(1, Ended(Outcome.ENGINE_GONE, output_tokens=3, text="x" * 900_000)), 0.0)
    assert scheduler.assumed == [PeerReported(EAST, RequestId("1"), Ended(Outcome.ENGINE_GONE, output_tokens=3))]


def test_what_a_peer_asks_for_again_and_again_in_one_message_is_sent_once() -> None:
    sent: list[Message] = []
    me = member.GroupMember(PeerId("me"), cast(Any, NothingHere()), sent.append)
    me.receive(EAST, Beat(0, (), (), ("me",)), 0.0)
    for number in range(300):
        placement = Placement(RequestId(f"{number}"), ReplicaId("r"), Reason.EXPLORE, 0, 10)
        me.on(RequestPlaced(Request.of(f"{number}", range(10)), placement), 0.0)
    sent.clear()
    me.receive(EAST, Again("me", (*[7] * 1000, *range(300))), 0.0)
    told = [message.number for message in sent if isinstance(message, PlacedRequest)]
    assert told == [7, *range(7), *range(8, 256)], "as many as a gateway of ours asks for at once"
