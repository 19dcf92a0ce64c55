"""What makes a packet one of the group: a MAC that only its gateways can make, and a number that never comes twice.

Each packet carries one MAC for each key that the sender has; a receiver takes it if any of them is by a key of its own.
So gateways that have the old keys, the new ones, or both, stay one group while keys are changed one gateway after the
other. A sender counts its packets; a receiver takes each number once, and none below it. No clock time is in a packet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from hmac import compare_digest, digest
from math import inf

from preble.core.types import PeerId
from preble.peers.packets import (
    MAC_BYTES,
    MOST_MACS,
    VERSION,
    BadPacket,
    Message,
    Packet,
    Why,
    decode,
    encode,
    join,
    split,
)

GRACE_S = 300.0
"""How long a key that was replaced still counts: the others may read the new one minutes later."""
_MOST_SENDERS = 1024
"""Whose last number is remembered, also after they have left: each has proved that it has a key."""


def group_key(secret: bytes, cluster: str) -> bytes:
    """Return the key of a cluster's packets, so that one secret may serve several clusters."""
    return digest(secret, f"preble peers {VERSION} {cluster}".encode(), "sha256")


class Seal:
    """Seals what a gateway sends, and opens what its peers send. `me`: its name, which no other has or ever had."""

    def __init__(self, me: PeerId, keys: Iterable[bytes]) -> None:
        self._me = me
        self._keys: dict[bytes, float] = dict.fromkeys(keys, inf)
        """With the time until which each counts."""
        self._sent = 0
        self._last: OrderedDict[PeerId, int] = OrderedDict()

    def change_keys(self, keys: Iterable[bytes], now: float) -> None:
        """Use these keys from now on. Those that they replace count for `GRACE_S` more."""
        new = dict.fromkeys(keys, inf)
        old = {key: min(until, now + GRACE_S) for key, until in self._keys.items() if key not in new and until > now}
        self._keys = dict([*new.items(), *sorted(old.items(), key=lambda one: -one[1])][:MOST_MACS])

    def seal(self, messages: tuple[Message, ...], now: float) -> bytes:
        """Return a packet, for `open` at a peer. O(its bytes)."""
        self._sent += 1
        body = encode(self._me, self._sent, messages)
        return join(tuple(_mac(key, body) for key in self._valid(now)), body)

    def open(self, data: bytes, now: float) -> Packet:
        """Return a peer's packet. Raises: BadPacket. O(its bytes)."""
        macs, body = split(data)
        if not any(compare_digest(own, mac) for own in (_mac(key, body) for key in self._valid(now)) for mac in macs):
            raise BadPacket("it has no MAC by a key of this group: give all gateways the same keys", Why.UNSIGNED)
        packet = decode(body)
        self._take_number(PeerId(packet.sender), packet.number)
        return packet

    def _valid(self, now: float) -> list[bytes]:
        return [key for key, until in self._keys.items() if until > now]

    def _take_number(self, sender: PeerId, number: int) -> None:
        """Raises: BadPacket: it is one that came before, or a later one did."""
        if sender == self._me or number <= self._last.get(sender, 0):
            raise BadPacket(f"its number {number} is not above the last one", Why.REPLAYED)
        self._last[sender] = number
        self._last.move_to_end(sender)
        if len(self._last) > _MOST_SENDERS:
            self._last.popitem(last=False)


def _mac(key: bytes, body: bytes) -> bytes:
    return digest(key, body, "sha256")[:MAC_BYTES]
