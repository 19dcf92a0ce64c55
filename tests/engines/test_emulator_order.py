"""`preble emulate --order`: whose turn it is on an emulated replica, started as users start it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from preble.engines.starting.launch import Fleet, LaunchOptions
from support.questions import Replica, VllmReplica, prompt_of, session
from support.waiting import eventually

MODEL = "tiny"
HOT = prompt_of(1, 320)
PROMPTS = {"cold1": prompt_of(2, 400), "hot1": [*HOT, *prompt_of(3, 80)], "cold2": prompt_of(4, 400), "hot2": [*HOT, 5]}
ENDLESS = 100_000


def options(log_dir: Path, *extra_args: str) -> LaunchOptions:
    args = ("--model", MODEL, "--max-running", "1", *extra_args)
    kv_tokens = 2 * ENDLESS
    return LaunchOptions(engine="emulator", replicas=1, log_dir=log_dir, kv_tokens=kv_tokens, extra_args=args)


async def served(replica: Replica, prompts: dict[str, Sequence[int]]) -> list[str]:
    """The order in which prompts are answered that wait together behind a request without end."""
    done: list[str] = []

    async def send(name: str) -> None:
        await replica.complete(prompts[name])
        done.append(name)

    async with asyncio.TaskGroup() as tasks:
        blocker = tasks.create_task(replica.complete([1], ENDLESS))
        await eventually(lambda: replica.runs(1), "the blocker runs")
        for number, name in enumerate(prompts, 1):
            tasks.create_task(send(name))

            async def waits(number: int = number) -> bool:
                return await replica.num_waiting() == number

            await eventually(waits, f"{name} waits")
        blocker.cancel()
    return done


@pytest.mark.parametrize(
    ("extra_args", "expected"),
    [
        ((), ["cold1", "hot1", "cold2", "hot2"]),
        (("--order", "fcfs"), ["cold1", "hot1", "cold2", "hot2"]),
        (("--order", "lpm"), ["hot1", "hot2", "cold1", "cold2"]),
        (("--order", "groups"), ["hot2", "hot1", "cold1", "cold2"]),
    ],
)
async def test_waiting_requests_are_served_in_the_order_asked_for(
    tmp_path: Path, extra_args: tuple[str, ...], expected: list[str]
) -> None:
    """hot1 and hot2 have as many cached tokens; of hot2 they are the greater part."""
    async with Fleet(options(tmp_path, *extra_args)) as fleet, session() as http:
        replica = VllmReplica(fleet.urls[0], http)
        await replica.complete(HOT)
        assert await served(replica, PROMPTS) == expected
