"""Packets between gateways: whoever reads one trusts nothing."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble.core.types import PeerId
from preble.peers import member
from preble.peers.packets import (
    MAX_PACKET_BYTES,
    VERSION,
    Again,
    BadPacket,
    Beat,
    Ejected,
    Ended,
    FirstToken,
    Held,
    Left,
    Message,
    PlacedRequest,
    Tokens,
    Unknown,
    Used,
    decode,
    encode,
)

EAST = PeerId("east")
MESSAGES: tuple[Message, ...] = (
    Tokens(b"h" * 16, b"1234"),
    PlacedRequest(1, "r0", 100, None, b"", b"12345678", "salted"),
    Held("r0", b"h" * 16, b"1234", "salted"),
    FirstToken(1),
    Ended(1, 20, 16),
    Beat(5, (1, 2), (3,), ("west",)),
    Again("west", (1, 2)),
    Unknown((b"h" * 16,)),
    Ejected("r0"),
    Used((("a key", 3, -500),), (("a tenant", 0.25),)),
    Left(),
)


def test_every_message_arrives_as_it_was_sent() -> None:
    packet = decode(encode(EAST, MESSAGES))
    assert (packet.sender, packet.messages) == (EAST, MESSAGES)


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        ([VERSION + 1, "east", [["a new kind"]]], "version 2; this gateway speaks version 1"),
        ([VERSION, "", []], "length"),
        ([VERSION, "east", [["f", -1]]], ">= 0"),
        ([VERSION, "east", [["f", "1"]]], "int"),
        ([VERSION, "east", [["?", 1]]], "Invalid value"),
        ([VERSION, "east", [["p", 1, "r0", 10, None, b"", b"123"]]], "no multiple of 4 bytes"),
        ([VERSION, "east", [["u", [b"h" * 17]]]], "length"),
        ({"version": 1}, "array"),
    ],
)
def test_a_packet_that_is_none_says_why(packet: object, why: str) -> None:
    with pytest.raises(BadPacket, match=why):
        decode(msgspec.msgpack.encode(packet))


def test_a_packet_that_is_too_large_is_not_read() -> None:
    with pytest.raises(BadPacket, match="at most"):
        decode(b"\0" * (MAX_PACKET_BYTES + 1))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_packet_or_refused(data: bytes) -> None:
    with suppress(BadPacket):
        decode(data)


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_packet_is_a_packet_or_refused(at: int, byte: int) -> None:
    data = bytearray(encode(EAST, MESSAGES))
    data[at % len(data)] = byte
    with suppress(BadPacket):
        decode(bytes(data))


class NothingHere:
    """A scheduler without replicas."""

    def assume(self, event: object, now: float) -> bool:
        return False


def test_what_exceeds_the_limit_of_a_peer_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "MOST_IN_FLIGHT", 2)
    sent: list[Message] = []
    me = member.GroupMember(PeerId("me"), cast(Any, NothingHere()), sent.append)
    for _ in range(2):
        me.receive(PeerId("peer"), Beat(9, (1, 2, 3), (), ("me",)), 0.0)
        for number in (1, 2, 3):
            me.receive(PeerId("peer"), PlacedRequest(number, "r", 1, None, b"", b"", ""), 0.0)
    assert [message for message in sent if isinstance(message, Again)] == [Again("peer", (1, 2))]
