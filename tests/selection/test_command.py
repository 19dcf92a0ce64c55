"""`preble select` as a process of its own."""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE

import aiohttp

from gateway.fakes import replicas
from support.waiting import eventually


async def test_the_command_says_where_it_listens_answers_and_ends_with_reservations_held() -> None:
    async with replicas(1) as [fake]:
        command = ["-m", "preble", "select", "--replica", fake.url, "--port", "0", "--lease", "77"]
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=PIPE, stderr=DEVNULL)
        try:
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode()
            [url] = re.findall(r"preble select: listening on (\S+)", line)
            async with aiohttp.ClientSession(url) as http:

                async def is_ready() -> bool:
                    async with http.get("/ready") as answer:
                        return answer.status == 200

                await eventually(is_ready)
                async with http.post("/select_and_reserve", json={"token_ids": [1, 2, 3]}) as answer:
                    assert (answer.status, (await answer.json())["lease_s"]) == (200, 77.0)
        finally:
            process.terminate()
        assert await process.wait() == 0
