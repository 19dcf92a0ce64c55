"""Requests that wait in a real engine, which serves them in Preble's order: whose turn it is, and who leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from preble.core.replica.waiting_queue import WaitingQueue
from preble.engines import Engine
from support.questions import Replica, completion, prompt_of, read
from support.replicas import PLACES, TEST_TIMEOUT_S
from support.waiting import eventually

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)

BLOCKER_TOKENS = 600
"""Output of a request that takes a place while others queue up and, in steps of the engine, long after."""

ATTEMPTS = 5
"""At having a queue before a blocker has all its output; a machine that is too busy for the first is not for all."""

WORK_S = 600.0
"""Patience with an engine that must compute thousands of tokens first, on a machine that does other work."""

HITS = 12
Blocker = asyncio.Task[tuple[int, bytes]]
T = TypeVar("T")


@asynccontextmanager
async def every_place_taken(engine: Engine, replica: Replica) -> AsyncIterator[list[Blocker]]:
    """By requests that are aborted at the end; one that is cancelled before frees its place at once."""
    bodies = [completion(prompt=prompt_of(90 + i, 8), max_tokens=BLOCKER_TOKENS) for i in range(PLACES)]
    blockers = [asyncio.create_task(read(engine, body)) for body in bodies]
    try:
        await eventually(lambda: replica.runs(PLACES), "every place is taken")
        yield blockers
    finally:
        for blocker in blockers:
            blocker.cancel()
        await asyncio.gather(*blockers, return_exceptions=True)


async def queued(replica: Replica, number: int, blockers: list[Blocker]) -> None:
    """Return when `count` wait, or when a blocker has ended too early for that."""

    async def they_are() -> bool:
        return await replica.num_waiting() >= number or any(blocker.done() for blocker in blockers)

    await eventually(they_are, f"{number} wait")


async def in_time(replica: Replica, attempt: Callable[[int], Awaitable[T | None]]) -> T:
    """What the first attempt gave in which no blocker ended too early; None stands for one that did."""
    for number in range(ATTEMPTS):
        if (seen := await attempt(number)) is not None:
            return seen
        await replica.emptied()
    pytest.fail(f"in {ATTEMPTS} attempts no queue was complete before a request of {BLOCKER_TOKENS} tokens ended")


async def test_hits_are_served_first(engine: Engine, replica: Replica) -> None:
    async def served(attempt: int) -> list[str] | None:
        hot, mild = prompt_of(100 + attempt, 256), prompt_of(200 + attempt, 160)
        await replica.complete(hot)
        await replica.complete(mild)
        prefixes = {"hot": hot, "mid": mild, "col": []}
        prompts = {
            name: [*prefixes[name[:3]], *prompt_of(300 + 10 * attempt + i, 296 - len(prefixes[name[:3]]))]
            for i, name in enumerate(("cold1", "cold2", "mid1", "cold3", "hot1", "hot2", "mid2", "hot3"))
        }
        return await served_order(engine, replica, prompts)

    expected = ["hot1", "hot2", "hot3", "mid1", "mid2", "cold1", "cold2", "cold3"]
    assert await in_time(replica, served) == expected


async def served_order(engine: Engine, replica: Replica, prompts: dict[str, list[int]]) -> list[str] | None:
    """The order in which requests are served that wait together; None where a blocker ended too early to tell."""
    done: list[str] = []

    async def send(name: str) -> None:
        await replica.complete(prompts[name], 2)
        done.append(name)

    async with every_place_taken(engine, replica) as blockers:
        async with asyncio.TaskGroup() as requests:
            for number, name in enumerate(prompts, 1):
                requests.create_task(send(name))
                await queued(replica, number, blockers)
            was_complete = not blockers[0].done()
            blockers[0].cancel()
        return done if was_complete and not blockers[1].done() else None


async def test_hits_without_end_do_not_starve_a_miss(engine: Engine, replica: Replica) -> None:
    bound = WaitingQueue(lambda item: 0).max_picks(num_older=HITS)
    assert bound is not None

    async def hits_before_a_miss(attempt: int) -> int | None:
        hot = prompt_of(700 + attempt, 512)
        await replica.complete(hot)
        hits = 0

        async def send_hits(first: int) -> None:
            nonlocal hits
            while hits <= bound and not (miss and miss.done()):
                await replica.complete([*hot, *prompt_of(first + hits, 20)])
                hits += 1

        miss: asyncio.Task[int] | None = None
        async with every_place_taken(engine, replica) as blockers, asyncio.TaskGroup() as requests:
            for i in range(HITS):
                requests.create_task(send_hits(10_000 * (i + 1)))
            await queued(replica, HITS, blockers)
            miss = requests.create_task(replica.complete(prompt_of(800 + attempt, 296)))
            await queued(replica, HITS + 1, blockers)
            was_complete = not any(blocker.done() for blocker in blockers)
            blockers[0].cancel()
        return hits if was_complete else None

    assert 0 < await in_time(replica, hits_before_a_miss) <= bound


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_it_waits_takes_it_out_of_the_queue(engine: Engine, replica: Replica, stream: bool) -> None:
    async def left(attempt: int) -> bool | None:
        async with every_place_taken(engine, replica) as blockers:
            work = asyncio.create_task(read(engine, completion(max_tokens=5, stream=stream)))
            await queued(replica, 1, blockers)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await eventually(nobody_waits, "it waits no longer")
            return True if await replica.runs(PLACES) else None

    async def nobody_waits() -> bool:
        return await replica.num_waiting() == 0

    await in_time(replica, left)


LONG_PROMPT, LONG_OUTPUT = 100, 1050
"""Two such requests are admitted at once, and in the end both do not fit: SGLang expects 0.7 of the output."""


async def test_preempted_requests_get_all_their_tokens(replica: Replica) -> None:
    before = await replica.num_preempted()
    pair = [prompt_of(i, LONG_PROMPT) for i in range(2)]
    assert await replica.generate(pair, LONG_OUTPUT) == 2 * LONG_OUTPUT
    assert await replica.num_preempted() > before
    await replica.emptied()


async def test_a_client_that_leaves_its_preempted_requests_leaves_nothing_behind(replica: Replica) -> None:
    async def leaves_a_preempted_one() -> bool:
        """False if both had ended before their preemption could be seen."""
        before = await replica.num_preempted()
        request = asyncio.create_task(replica.generate([prompt_of(10 + i, LONG_PROMPT) for i in range(2)], LONG_OUTPUT))

        async def one_is_preempted() -> bool:
            return await replica.num_preempted() > before or request.done()

        await eventually(one_is_preempted, "one is preempted", WORK_S)
        left = request.cancel()
        await asyncio.wait([request])
        return left

    await eventually(leaves_a_preempted_one, "a preempted one is left", WORK_S)
    await replica.emptied()


async def test_120_requests_with_preemptions_and_disconnects_leave_nothing(replica: Replica) -> None:
    before = await replica.num_preempted()
    prefixes = [prompt_of(400 + i, 256) for i in range(3)]

    async def short(number: int) -> bool:
        """Whether it was answered in full."""
        return await replica.generate([*prefixes[number % 3], *prompt_of(500 + number, 40)], 4) == 4

    async def two_long(number: int) -> bool:
        pair = [prompt_of(500 + number + i, LONG_PROMPT) for i in range(2)]
        return await replica.generate(pair, LONG_OUTPUT) == 2 * LONG_OUTPUT

    async def two_run() -> bool:
        return await replica.runs(2) or await replica.num_preempted() > before

    async def some_wait() -> bool:
        return await replica.num_waiting() > 0

    async with asyncio.TaskGroup() as tasks:
        requests = [tasks.create_task(two_long(0))]
        await eventually(two_run, "the long ones run", WORK_S)
        requests += [tasks.create_task(short(number)) for number in range(2, 118)]
        requests += [tasks.create_task(two_long(118))]
        await eventually(some_wait, "some wait", WORK_S)
        num_cancelled = sum(request.cancel() for request in requests[5::9])
    answered = [request.result() for request in requests if not request.cancelled()]
    assert num_cancelled > 0
    assert answered == [True] * (len(requests) - num_cancelled)
    assert await replica.num_preempted() > before
    await replica.emptied()
