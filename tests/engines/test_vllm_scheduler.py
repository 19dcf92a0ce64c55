"""Preble's order inside vLLM: in its own scheduler without a model (`support/inside_vllm.py`), and in a real server."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from preble.core.waiting_queue import WaitingQueue
from support.arrangements import assert_cores_order
from support.replicas import PLACES, ROOT, VLLM, Replica, VllmPair, prompt_of, require_vllm
from support.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCKER_TOKENS = 600
"""Output of a request that takes a place while others queue up and, in steps of the engine, long after."""

ATTEMPTS = 5
"""At having a queue before a blocker has all its output; a machine that is too busy for the first is not for all."""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What the scenarios of `inside_vllm.py` saw, by name."""
    require_vllm()
    program = [str(VLLM.with_name("python")), str(ROOT / "tests" / "support" / "inside_vllm.py")]
    finished = subprocess.run(program, capture_output=True, text=True, check=False, timeout=500)
    assert finished.returncode == 0, finished.stderr[-4000:]
    scenarios: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return scenarios


def test_hits_come_before_misses_and_only_where_it_is_asked_for(seen: dict[str, Any]) -> None:
    as_they_came = ["cold1", "cold2", "mid1", "cold3", "hot1", "hot2", "mid2", "hot3"]
    by_hits = ["hot1", "hot2", "hot3", "mid1", "mid2", "cold1", "cold2", "cold3"]
    assert seen["orders"]["stock"] == seen["orders"]["fcfs"] == as_they_came
    assert seen["orders"]["groups"] == seen["orders"]["default"] == seen["orders"]["lpm"] == by_hits
    assert seen["orders"]["asynchronous"] == by_hits


def test_every_arrangement_is_the_order_of_cores_waiting_queue(seen: dict[str, Any]) -> None:
    assert_cores_order(seen["churn"]["records"])


def test_what_is_remembered_of_the_cache_is_what_vllm_finds(seen: dict[str, Any]) -> None:
    assert seen["churn"]["kind"], "the plain kind of cache"
    answers = [
        (record["told"][name], found)
        for record in seen["churn"]["records"]
        for name, _, found in record["waiting"]
        if name not in record["in_front"]
    ]
    assert [answer for answer in answers if answer[0] != answer[1]] == []
    assert len(answers) > 1000
    assert len(set(answers)) > 10, "different parts of prompts were cached"


def test_120_requests_in_a_tiny_cache_with_aborts_leave_nothing(seen: dict[str, Any]) -> None:
    pressure = seen["pressure"]
    assert pressure["preemptions"] > 10
    assert 80 < pressure["finished"] < 120, "some were aborted, all others got all their tokens"
    assert pressure["used_blocks"] == pressure["left"] == pressure["remembered"] == 0


def test_preempted_requests_stay_in_front_of_better_hits(seen: dict[str, Any]) -> None:
    records = seen["preempted_in_front"]
    assert any(len(record["arranged"]) > len(record["in_front"]) for record in records), "others waited too"
    for record in records:
        assert record["arranged"][: len(record["in_front"])] == record["in_front"]


def test_hits_without_end_do_not_starve_a_miss(seen: dict[str, Any]) -> None:
    groups, lpm = seen["starvation"]["groups"], seen["starvation"]["lpm"]
    assert groups["admitted"][-1] == "miss"
    assert len(groups["admitted"]) <= groups["max_picks"]
    assert "miss" not in lpm["admitted"], "the same hits starve it where the longest prefix always goes first"


def test_models_with_several_kinds_of_layers_are_asked_about_in_turn(seen: dict[str, Any]) -> None:
    hybrid = seen["two_kinds_of_layers"]
    assert hybrid["kind"]
    assert hybrid["asked_at_first"] == 2
    assert hybrid["told"] == hybrid["true"]
    assert [name[:3] for name in hybrid["admitted"]] == ["hot"] * 10 + ["col"] * 10


@pytest.mark.parametrize(
    ("what", "part"),
    [
        ("order", "'fair'"),
        ("table", '{"order": "lpm"}'),
        ("policy", "--scheduling-policy fcfs"),
        ("version", "PREBLE_ANY_ENGINE_VERSION=1"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(seen: dict[str, Any], what: str, part: str) -> None:
    assert part in (seen["refusals"][what] or "it was accepted")


@pytest.fixture
async def replica(vllm_pair: VllmPair) -> AsyncIterator[Replica]:
    """The one that orders as Preble does, idle and with an empty cache."""
    async with aiohttp.ClientSession() as session:
        second = Replica(vllm_pair.urls[1], session)
        await idle(second)
        await second.reset_prefix_cache()
        yield second


async def idle(replica: Replica) -> None:
    async def nothing_is_left() -> bool:
        return await replica.num_running() + await replica.num_waiting() == 0

    await eventually(nothing_is_left, "the engine is idle")


async def running_blockers(replica: Replica, tasks: asyncio.TaskGroup, count: int) -> list[asyncio.Task[int]]:
    blockers = [tasks.create_task(replica.complete(prompt_of(90 + i, 8), BLOCKER_TOKENS)) for i in range(count)]

    async def all_run() -> bool:
        return await replica.num_running() == count

    await eventually(all_run, "the blockers run")
    return blockers


async def served_order(replica: Replica, prompts: dict[str, list[int]]) -> list[str] | None:
    """The order in which requests are served that wait together; None where a blocker ended too early to tell."""
    done: list[str] = []

    async def send(name: str) -> None:
        await replica.complete(prompts[name], 2)
        done.append(name)

    async def all_wait() -> bool:
        return blockers[0].done() or await replica.num_waiting() == len(prompts)

    async with asyncio.TaskGroup() as tasks:
        blockers = await running_blockers(replica, tasks, PLACES)
        async with asyncio.TaskGroup() as requests:
            for number, name in enumerate(prompts, 1):
                requests.create_task(send(name))
                await eventually(lambda number=number: at_least(replica, number, blockers[0]), f"{name} waits")
            await eventually(all_wait, "all wait")
            blockers[0].cancel()
        in_time = not blockers[1].done() and blockers[0].cancelled()
        blockers[1].cancel()
    return done if in_time else None


async def at_least(replica: Replica, number: int, blocker: asyncio.Task[int]) -> bool:
    return blocker.done() or await replica.num_waiting() >= number


async def test_a_server_serves_hits_first(replica: Replica) -> None:
    for attempt in range(ATTEMPTS):
        hot, mild = prompt_of(100 + attempt, 256), prompt_of(200 + attempt, 160)
        await replica.complete(hot)
        await replica.complete(mild)
        prefixes = {"hot": hot, "mid": mild, "col": []}
        prompts = {
            name: [*prefixes[name[:3]], *prompt_of(300 + 10 * attempt + i, 296 - len(prefixes[name[:3]]))]
            for i, name in enumerate(("cold1", "cold2", "mid1", "cold3", "hot1", "hot2", "mid2", "hot3"))
        }
        if (served := await served_order(replica, prompts)) is not None:
            assert served == ["hot1", "hot2", "hot3", "mid1", "mid2", "cold1", "cold2", "cold3"]
            return
        await idle(replica)
    pytest.fail(
        f"in {ATTEMPTS} attempts the queue never was complete before a request of {BLOCKER_TOKENS} tokens ended"
    )


async def test_a_server_with_a_tiny_cache_survives_preemptions_and_disconnects(replica: Replica) -> None:
    preempted_before = await replica.metric("vllm:num_preemptions_total")
    prefixes = [prompt_of(400 + i, 256) for i in range(3)]

    async def run(number: int) -> int:
        # Two of the long ones do not fit at the same time, even if one has only half of its output.
        tail, output = (650, 250) if number % 5 == 0 else (40, 4)
        return await replica.complete([*prefixes[number % 3], *prompt_of(500 + number, tail)], output)

    async with asyncio.TaskGroup() as tasks:
        requests = [tasks.create_task(run(number)) for number in range(120)]
        await eventually(lambda: at_least(replica, 90, requests[-1]), "most of them wait")
        num_cancelled = sum(request.cancel() for request in requests[5::9])
    assert sum(request.cancelled() for request in requests) == num_cancelled > 0
    await idle(replica)
    assert await replica.metric("vllm:num_preemptions_total") > preempted_before
    assert await replica.metric("vllm:kv_cache_usage_perc") == 0
    await replica.reset_prefix_cache()


async def test_a_server_does_not_starve_a_miss_among_hits_without_end(replica: Replica) -> None:
    hot = prompt_of(700, 512)
    await replica.complete(hot)
    hits = 0

    async def send_hits(first: int, until: asyncio.Task[int]) -> None:
        nonlocal hits
        while not until.done():
            await replica.complete([*hot, *prompt_of(first + hits, 20)])
            hits += 1

    async with asyncio.TaskGroup() as tasks:
        [blocker, _] = await running_blockers(replica, tasks, PLACES)
        miss = tasks.create_task(wait_behind(replica, blocker))
        for i in range(12):
            tasks.create_task(send_hits(10_000 * (i + 1), miss))
        await miss
        bound = WaitingQueue(lambda item: 0).max_picks(num_older=12)
        assert bound is not None and hits <= bound


async def wait_behind(replica: Replica, blocker: asyncio.Task[int]) -> int:
    """Send a miss when ten hits wait, then free a place."""
    await eventually(lambda: at_least(replica, 10, blocker), "hits wait")
    async with asyncio.TaskGroup() as tasks:
        miss = tasks.create_task(replica.complete(prompt_of(800, 296)))
        await eventually(lambda: at_least(replica, 11, blocker), "the miss waits")
        blocker.cancel()
    return miss.result()
