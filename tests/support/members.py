"""Following a source of members in a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from preble import background
from preble.discovery import Member, Source


class Followed:
    """What a source has yielded so far."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.sets: list[tuple[Member, ...]] = []

    @property
    def urls(self) -> list[str] | None:
        """Of the last set; None before the first."""
        return [member.url for member in self.sets[-1]] if self.sets else None

    async def run(self) -> None:
        async for members in self.source.members():
            self.sets.append(members)


@asynccontextmanager
async def followed(source: Source) -> AsyncIterator[Followed]:
    """The source is followed within the context."""
    follower = Followed(source)
    task = asyncio.create_task(follower.run())
    try:
        yield follower
    finally:
        await background.end(task)
