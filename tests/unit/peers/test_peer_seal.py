"""Only gateways that have a key of the group are heard, and each of their packets once."""

from __future__ import annotations

import pytest

from preble.core.types import PeerId
from preble.peers.packets import BadPacket, Ejected, Left, Message, Why, encode, join, split
from preble.peers.seal import GRACE_S, Seal, group_key

EAST, WEST = PeerId("east/1"), PeerId("west/1")
OLD, NEW = group_key(b"the old secret", "default"), group_key(b"the new secret", "default")
SAID: tuple[Message, ...] = (Ejected("r0"),)


def why_not(receiver: Seal, packet: bytes, now: float = 0.0) -> Why | None:
    try:
        receiver.open(packet, now)
    except BadPacket as error:
        return error.why
    return None


def test_a_packet_of_the_group_is_opened() -> None:
    packet = Seal(WEST, [OLD]).open(Seal(EAST, [OLD]).seal(SAID, 0.0), 0.0)
    assert (packet.sender, packet.messages) == (EAST, SAID)


def test_a_stranger_is_not_heard() -> None:
    """He may know everything that is on the bus, but no key."""
    west, east = Seal(WEST, [OLD]), Seal(EAST, [OLD])
    macs, body = split(east.seal(SAID, 0.0))
    forged = encode(EAST, 10**6, (Left(),))
    for packet in (join((), forged), join(macs, forged), join((b"\0" * 16,), body), join((), body)):
        assert why_not(west, packet) is Why.UNSIGNED
    assert why_not(west, join(macs, body)) is None, "what was refused has spoiled nothing"


def test_another_cluster_with_the_same_secret_is_another_group() -> None:
    other = group_key(b"the old secret", "other")
    assert why_not(Seal(WEST, [OLD]), Seal(EAST, [other]).seal(SAID, 0.0)) is Why.UNSIGNED


def test_a_packet_counts_once_and_none_before_it_counts_later() -> None:
    west, east = Seal(WEST, [OLD]), Seal(EAST, [OLD])
    first, second = east.seal(SAID, 0.0), east.seal(SAID, 0.0)
    assert [why_not(west, packet) for packet in (second, second, first)] == [None, Why.REPLAYED, Why.REPLAYED]
    assert why_not(west, east.seal(SAID, 0.0)) is None


def test_our_own_packets_are_not_taken_back() -> None:
    east = Seal(EAST, [OLD])
    assert why_not(east, east.seal(SAID, 0.0)) is Why.REPLAYED


def test_a_gateway_that_restarts_is_another_sender() -> None:
    """Its name has a part that is new at each start, so its numbers begin anew."""
    west, east = Seal(WEST, [OLD]), Seal(EAST, [OLD])
    for _ in range(5):
        assert why_not(west, east.seal(SAID, 0.0)) is None
    assert why_not(west, Seal(PeerId("east/2"), [OLD]).seal(SAID, 0.0)) is None


@pytest.mark.parametrize("first", [EAST, WEST])
def test_while_keys_change_one_gateway_after_the_other_all_are_one_group(first: PeerId) -> None:
    seals = {EAST: Seal(EAST, [OLD]), WEST: Seal(WEST, [OLD])}
    one, other = seals[first], next(seal for name, seal in seals.items() if name != first)

    def hear_each_other(now: float) -> bool:
        return why_not(one, other.seal(SAID, now), now) is None and why_not(other, one.seal(SAID, now), now) is None

    one.change_keys([NEW], 100.0)
    late = 100.0 + 0.9 * GRACE_S
    assert hear_each_other(100.0) and hear_each_other(late)
    fresh = Seal(PeerId("north/1"), [NEW])
    assert why_not(one, fresh.seal(SAID, late), late) is None
    other.change_keys([NEW], late)
    assert hear_each_other(late) and hear_each_other(late + 2 * GRACE_S)


def test_an_old_key_counts_for_the_grace_only() -> None:
    west, stayed = Seal(WEST, [OLD]), Seal(EAST, [OLD])
    west.change_keys([NEW], 100.0)
    assert why_not(west, stayed.seal(SAID, 0.0), 100.0 + GRACE_S) is Why.UNSIGNED
    west.change_keys([NEW], 100.0 + GRACE_S)
    assert why_not(west, stayed.seal(SAID, 0.0), 100.0 + GRACE_S) is Why.UNSIGNED, "another reload keeps no dead key"


def test_reloads_without_another_key_change_nothing_and_many_keys_are_bounded() -> None:
    west, east = Seal(WEST, [OLD]), Seal(EAST, [OLD])
    for now in range(100):
        west.change_keys([group_key(b"%d" % now, "default")], float(now))
    west.change_keys([OLD], 200.0)
    packet = west.seal(SAID, 200.0)
    assert len(split(packet)[0]) <= 4
    assert why_not(east, packet, 200.0) is None
