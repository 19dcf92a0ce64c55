"""Frames of the scheduler's socket, without a socket."""

from __future__ import annotations

from unittest.mock import Mock

from preble.serving.link import protocol as m
from preble.serving.link.frames import LENGTH, FrameProtocol


class Carrier(FrameProtocol[m.FromScheduler]):
    def received(self, message: m.FromScheduler) -> None: ...

    def ended(self) -> None: ...


async def test_what_has_come_of_a_message_is_not_kept_after_its_connection() -> None:
    carrier = Carrier(m.FromScheduler)
    carrier.connection_made(Mock())
    carrier.data_received(LENGTH.pack(1_000_000) + bytes(1_000))
    carrier.data_received(bytes(1_000))
    assert len(carrier._arrived) == 2_000 + LENGTH.size
    carrier.connection_lost(None)
    assert len(carrier._arrived) == 0
