"""The changes that a replica's KV events report, one by one, for a test that looks at some of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from preble.core.types import KvEvent

Take = Callable[[Sequence[KvEvent]], None]


async def changes_of(follow: Callable[[Take], Coroutine[Any, Any, None]]) -> AsyncIterator[KvEvent]:
    """What `follow` gives, for example `Engine.follow_kv_events`, without end."""
    changes: asyncio.Queue[KvEvent] = asyncio.Queue()

    def take(together: Sequence[KvEvent]) -> None:
        for change in together:
            changes.put_nowait(change)

    following = asyncio.create_task(follow(take))
    try:
        while True:
            yield await changes.get()
    finally:
        following.cancel()
