"""Clients that ask a gateway all the time, and what went wrong for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp

from support.waiting import eventually


class Load:
    """Clients that ask, whole and streamed, until `ends`."""

    def __init__(self, connect: Callable[[], aiohttp.ClientSession]) -> None:
        self._connect = connect
        self.wrong: list[str] = []
        self.reasons: Counter[str] = Counter()
        self.answered = 0
        self.ends = False

    async def go_on(self) -> None:
        async with self._connect() as http:
            while not self.ends:
                body = {"model": "tiny", "prompt": "hello", "stream": self.answered % 2 == 0}
                try:
                    async with http.post("/v1/completions", json=body) as answer:
                        text = await answer.text()
                        if answer.status != 200 or (body["stream"] and "[DONE]" not in text):
                            self.wrong.append(f"{answer.status} {text}")
                        self.reasons[answer.headers.get("x-preble-reason", "")] += 1
                except aiohttp.ClientError as error:
                    self.wrong.append(repr(error))
                self.answered += 1

    async def some_more(self, count: int = 20) -> None:
        target = self.answered + count
        await eventually(lambda: self.answered >= target)


@asynccontextmanager
async def load(connect: Callable[[], aiohttp.ClientSession], clients: int = 4) -> AsyncIterator[Load]:
    """Clients that ask within the context.

    At its end each gets its last answer: what it left would be counted by the gateway and not by a replica.
    """
    one = Load(connect)
    tasks = [asyncio.create_task(one.go_on()) for _ in range(clients)]
    try:
        yield one
        one.ends = True
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
