"""An emulated pair that prefills and decodes does, answers and refuses what a pair of real SGLangs does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from preble.config import ReplicaConfig, TimeoutsConfig
from preble.engines import connect
from preble.engines.starting.launch import Fleet, LaunchOptions
from support.gateways import gateway_before, idle, quick_gateway
from support.own_pair import pair_options
from support.pairs import NO_TRANSFER, Answer, Pair, pair_of
from support.replicas import KV_TOKENS, MAX_MODEL_LEN, MODEL_NAME, PAGE_SIZE, TEST_TIMEOUT_S
from support.split_burst import SplitBurst
from support.waiting import PATIENCE_S

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]

LENGTH = 20 * PAGE_SIZE + 5
Step = Callable[[Pair, list[int], list[int]], Coroutine[Any, Any, Any]]
"""Takes two prompts that nobody has seen, and gives what must be alike."""


def told(answer: Answer) -> tuple[Any, ...]:
    """Return what both say alike of one leg: not its text."""
    if answer.status != 200:
        return answer.status, answer.fields["type"], answer.fields["message"].split(" failed ")[0].split(" req.rid")[0]
    return answer.status, answer.num_tokens, answer.cached_tokens, len(answer.fields["choices"])


async def said(pair: Pair, prompt: list[int], other: list[int]) -> Any:
    del prompt, other
    found = []
    for url in (pair.prefill, pair.decode):
        server = connect(url)
        probed = await server.probe()
        spec, peer = probed.info.spec, probed.engine.kv_peer
        found.append((probed.info.engine, spec.role, spec.reports_events, spec.block_size, spec.kv_capacity_tokens))
        found.append(peer and peer == f"127.0.0.1:{pair.bootstrap_port}")
        await server.close()
    return found


async def right(pair: Pair, prompt: list[int], other: list[int], **more: Any) -> Any:
    """Ask for a prompt twice, and for its answer's beginning each time."""
    del other
    first, again = await pair.answered(prompt, **more), await pair.answered(prompt, **more)
    same = [a.text == b.text for a, b in zip(first, again, strict=True)]
    return [told(answer) for answer in (*first, *again)], same, first[1].text.startswith(first[0].text)


async def of_a_list(pair: Pair, prompt: list[int], other: list[int]) -> Any:
    alone = [(await pair.answered(one))[1].text for one in (prompt, other)]
    answers = await pair.answered([prompt, other])
    return [answer.status for answer in answers], [choice["text"] for choice in answers[1].fields["choices"]] == alone


async def refused(pair: Pair, prompt: list[int], other: list[int]) -> Any:
    del other
    plain = pair.body(prompt)
    whole = [told(await pair.ask(url, plain)) for url in (pair.prefill, pair.decode)]
    streamed = [await pair.ask(url, {**plain, "stream": True}) for url in (pair.prefill, pair.decode)]
    errors = [(answer.status, [event["error"]["code"] for event in answer.fields]) for answer in streamed]
    return whole, errors, [event["error"]["type"] for answer in streamed for event in answer.fields]


async def checked(pair: Pair, prompt: list[int], other: list[int]) -> Any:
    del other
    right = [answer.text for answer in await pair.answered(prompt)]
    answers = await pair.both({**pair.body(prompt), **NO_TRANSFER})
    return [answer.status for answer in answers], [a.text == b for a, b in zip(answers, right, strict=True)]


async def unanswered(*legs: asyncio.Task[Answer]) -> None:
    """Raises: AssertionError: one is answered within a second. SGLang's own counters stand still meanwhile."""
    done, _ = await asyncio.wait(legs, timeout=1.0)
    assert not done


async def alone(pair: Pair, prompt: list[int], other: list[int]) -> Any:
    """Leave one leg, then the other, waiting, until its client leaves; then ask both."""
    for url in (pair.prefill, pair.decode):
        waiting = asyncio.create_task(pair.ask(url, {**pair.body(prompt), **pair.room()}))
        await unanswered(waiting)
        waiting.cancel()
    return [told(answer) for answer in await pair.answered(other)]


async def late(pair: Pair, prompt: list[int], other: list[int]) -> Any:
    answers = []
    for one, first, then in ((prompt, pair.prefill, pair.decode), (other, pair.decode, pair.prefill)):
        body = {**pair.body(one), **pair.room()}
        waiting = asyncio.create_task(pair.ask(first, body))
        await unanswered(waiting)
        answers += [told(await pair.ask(then, body)), told(await waiting)]
    return answers


async def used_again(pair: Pair, prompt: list[int], other: list[int]) -> Any:
    room, texts = pair.room(), []
    for one in (prompt, other):
        [_, decoded] = await pair.both({**pair.body(one), **room})
        texts.append(decoded.text == (await pair.answered(one))[1].text)
    return texts


async def in_room_0(pair: Pair, prompt: list[int], other: list[int]) -> Any:
    """Leave the decoding one, which does not answer though the other has."""
    body = {**pair.body(prompt), **pair.room(bootstrap_room=0)}
    decoding = asyncio.create_task(pair.ask(pair.decode, body))
    await unanswered(decoding)
    asked = asyncio.create_task(pair.ask(pair.prefill, body))
    await unanswered(decoding)
    for leg in (decoding, asked):
        leg.cancel()
    return [told(answer) for answer in await pair.answered(other)]


async def too_long(pair: Pair, prompt: list[int], other: list[int]) -> Any:
    del other
    answers = await pair.answered(prompt * (2 * MAX_MODEL_LEN // len(prompt)))
    return [answer.status for answer in answers]


async def placed(pair: Pair, prompt: list[int], other: list[int]) -> Any:
    """Ask a gateway before both, which knows nothing of them but their addresses."""
    told_directly = [(await pair.answered(one))[1] for one in (prompt, other)]
    settings: dict[str, Any] = {"engine": "auto", "timeouts": TimeoutsConfig(no_replica_wait_s=60.0)}
    async with quick_gateway((pair.prefill, pair.decode), "preble", **settings) as gateway:
        given = [await pair.ask(gateway.url, pair.body(one)) for one in (prompt, other)]
        streamed = await pair.ask(gateway.url, pair.body(prompt, stream=True))
    text = "".join(choice["text"] for event in streamed.fields for choice in event["choices"])
    same = [a.text == b.text for a, b in zip(given, told_directly, strict=True)]
    return [told(answer) for answer in given], same, streamed.status, text == given[0].text


STEPS: tuple[Step, ...] = (
    said,
    right,
    partial(right, max_tokens=1),
    of_a_list,
    refused,
    checked,
    alone,
    late,
    used_again,
    in_room_0,
    too_long,
    placed,
)


async def killed(fleet: Fleet, pair: Pair, prompt: list[int]) -> Any:
    """Return what the decoding one says to those that wait when the other is killed; one streams. It is killed under a
    gateway, whose clients get what is right or an error.
    """
    body = pair.body(prompt)
    waiting = [pair.ask(pair.decode, {**body, **pair.room(), "stream": stream}) for stream in (False, True)]
    replicas = [ReplicaConfig(url) for url in fleet.urls]
    async with gateway_before(replicas, timeouts=TimeoutsConfig(no_replica_wait_s=1.0)) as gateway:
        burst = SplitBurst(
            gateway, fleet.urls, Random(26), lambda url: fleet.replicas[0].kill(), LENGTH, are_pairs=True
        )
        await burst.know(gateway.url)
        assert await burst.round()
        await burst.nothing_is_left(PATIENCE_S)
        tasks = [asyncio.create_task(one) for one in waiting]
        await unanswered(*tasks)
        assert await burst.round("source")
        whole, streamed = await asyncio.gather(*tasks)
        await burst.nothing_is_left(PATIENCE_S)
        await idle(gateway)
    [event] = streamed.fields
    said = "Lost connection with prefill instance"
    return told(whole)[:2], said in whole.fields["message"], streamed.status, said in event["error"]["message"]


async def seen(options: LaunchOptions) -> list[Any]:
    rng, fleet = Random(26), Fleet(options)

    def prompt() -> list[int]:
        return rng.choices(range(100, 4000), k=LENGTH)

    async with fleet, pair_of(fleet, MODEL_NAME) as pair:
        taken = [await step(pair, prompt(), prompt()) for step in STEPS]
        return [*taken, await killed(fleet, pair, prompt())]


def emulated(folder: Path) -> LaunchOptions:
    arguments = ("--model", MODEL_NAME, "--block-size", str(PAGE_SIZE))
    given: dict[str, Any] = {"kv_tokens": KV_TOKENS, "roles": ("prefill", "decode"), "extra_args": arguments}
    return LaunchOptions(engine="emulator", replicas=2, log_dir=folder, **given)


async def test_an_emulated_pair_does_what_a_real_one_does(tmp_path: Path) -> None:
    ours = await seen(emulated(tmp_path / "emulated"))
    theirs = await seen(pair_options(tmp_path / "real"))
    assert ours == theirs
