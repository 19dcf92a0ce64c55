"""Watches of the picker's health, without a gateway and a connection."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from preble import background
from preble.picker.server import Picker
from support.waiting import eventually

SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


class Watch:
    """A call that asks for `readiness`. `heard`: what it was told."""

    num_alike = 0

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    async def read(self) -> bytes:
        return b"\x0a\x09readiness"

    async def write(self, message: bytes) -> None:
        self.heard.append(message)


async def test_a_watch_that_begins_between_two_changes_hears_the_last_one() -> None:
    leadership = SimpleNamespace(is_leader=True)
    gateway = SimpleNamespace(serving=SimpleNamespace(waits_for=None), is_draining=False)
    picker, watch = Picker(cast(Any, gateway), cast(Any, leadership)), Watch()
    watching = asyncio.create_task(picker.watch_health(cast(Any, watch)))
    await eventually(lambda: watch.heard != [])
    leadership.is_leader = False
    following = asyncio.create_task(picker.follow_health())
    await eventually(lambda: watch.heard[-1] == NOT_SERVING, timeout_s=10.0)
    leadership.is_leader = True
    await eventually(lambda: watch.heard[-1] == SERVING)
    await background.end(watching, following)
