from __future__ import annotations

import asyncio
import contextlib
from itertools import pairwise
from pathlib import Path

from preble.cli.running import reported_waiting
from preble.engines.starting.commands import Command
from preble.engines.starting.launch import ReplicaProcess, keep_running
from preble.errors import EngineGone
from support.virtual_time import VirtualTimeLoop


def test_a_slow_start_is_reported_until_it_ends() -> None:
    said: list[str] = []

    async def start_slowly() -> None:
        async with reported_waiting(said.append, 300.0):
            await asyncio.sleep(35.0)
        await asyncio.sleep(60.0)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(start_slowly())
    assert said == [f"still starting after {waited} s, 300 s at most" for waited in (10, 20, 30)]


class Failing(ReplicaProcess):
    """A replica that lives for `lives` seconds in turn and then ends; where 0, it does not even get ready."""

    def __init__(self, lives: list[float]) -> None:
        super().__init__("r0", Command(("true",), {}, 1), Path("r0.log"))
        self.lives = lives
        self.started_at: list[float] = []

    async def start(self) -> None:
        self.started_at.append(asyncio.get_running_loop().time())

    async def wait_ready(self, timeout_s: float) -> None:
        if self.lives[:1] == [0.0]:
            self.lives.pop(0)
            raise EngineGone("r0 ended before it was ready.\nThe end of its log", replica_id="r0")

    async def wait(self) -> int:
        if not self.lives:
            await asyncio.Event().wait()
        await asyncio.sleep(self.lives.pop(0))
        return 1


def kept_running(lives: list[float], until_s: float) -> tuple[list[float], list[str]]:
    """When the replica was started again, and what was said."""
    replica, said = Failing(lives), list[str]()

    async def keep() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until_s):
                await keep_running(replica, 300.0, said.append)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(keep())
    return replica.started_at, said


def test_a_replica_that_ends_is_started_again_after_pauses_that_grow_to_a_minute() -> None:
    started, said = kept_running([5.0] + [0.5] * 9, 500.0)
    pauses = [start - before - 0.5 for before, start in pairwise(started)]
    assert started[0] == 6.0
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0]
    assert said[:2] == [
        "r0 ended with status 1; starting it again in 1 s. See r0.log",
        "r0 is ready again at http://127.0.0.1:1",
    ]


def test_a_replica_that_has_run_for_long_is_started_again_soon() -> None:
    started, _ = kept_running([1.0, 1.0, 1000.0, 1.0], 2000.0)
    assert started == [2.0, 5.0, 1006.0, 1009.0]


def test_a_replica_that_does_not_get_ready_again_is_tried_again() -> None:
    started, said = kept_running([1.0, 0.0, 2.0], 100.0)
    assert "r0 did not start again: r0 ended before it was ready." in said
    assert started == [2.0, 6.0]
