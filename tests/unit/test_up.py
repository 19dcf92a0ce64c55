from __future__ import annotations

import asyncio

from preble.cli.up import reported_waiting
from support.virtual_time import VirtualTimeLoop


def test_a_slow_start_is_told_of_until_it_ends() -> None:
    said: list[str] = []

    async def start_slowly() -> None:
        async with reported_waiting(300.0, said.append):
            await asyncio.sleep(40.0)
        await asyncio.sleep(60.0)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(start_slowly())
    assert said == [f"still starting after {waited} s, 300 s at most" for waited in (15, 30)]
