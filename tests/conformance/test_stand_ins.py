"""What stands for a real program in tests says what the real one says (tests/README.md lists them all)."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from engines.conftest import endpoints_of
from gateway.fakes import replicas
from preble.engines.kv_events.sockets import END_OF_REPLAY, KvEventEndpoints
from preble.engines.starting.launch import Fleet, LaunchOptions
from support.kv_publisher import ScriptedPublisher, cleared, removed, stored
from support.questions import VllmReplica, asked, client_of, prompt_of, session
from support.replicas import (
    KV_TOKENS,
    MAX_MODEL_LEN,
    MODEL_NAME,
    ROOT,
    TEST_TIMEOUT_S,
    TINY_MODEL,
    VLLM,
    VllmPair,
    require_vllm,
)
from support.waiting import PATIENCE_S

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(TEST_TIMEOUT_S)]
FAKE_VLLM = str(ROOT / "tests" / "support" / "fake_vllm.py")
CHAT = [{"role": "user", "content": "hello"}]
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
QUESTIONS: Mapping[str, tuple[str, dict[str, Any] | None]] = {
    "models": ("/v1/models", None),
    "completion": ("/v1/completions", {"prompt": "hello", "max_tokens": 3}),
    "completions": ("/v1/completions", {"prompt": "hello", "max_tokens": 3, "n": 2}),
    "streamed completion": ("/v1/completions", {"prompt": "hello", "max_tokens": 3, **STREAMED}),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3}),
    "streamed chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3, **STREAMED}),
    "tokens": ("/tokenize", {"prompt": "hello"}),
    "tokens of a chat": ("/tokenize", {"messages": CHAT}),
}


def form_of(*values: Any) -> dict[str, set[str]]:
    """By the path of each field below these values: the types of its values."""
    form: dict[str, set[str]] = {}

    def walk(value: Any, path: str) -> None:
        kind = "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
        form.setdefault(path, set()).add(kind)
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(inner, f"{path}.{name}")
        elif isinstance(value, list | tuple):
            for inner in value:
                walk(inner, f"{path}[]")

    for value in values:
        walk(value, "")
    return form


def differences(ours: Sequence[Any], theirs: Sequence[Any]) -> dict[str, set[str]]:
    """Fields of ours that theirs do not have, or not with such a value, and the types of their values."""
    real = form_of(*theirs)
    return {path: kinds for path, kinds in form_of(*ours).items() if not kinds <= real.get(path, set())}


@asynccontextmanager
async def fake(_: Path) -> AsyncIterator[str]:
    async with replicas(1, max_model_len=MAX_MODEL_LEN) as [replica]:
        replica.cached_tokens = 0
        yield replica.url


@asynccontextmanager
async def emulated(log_dir: Path) -> AsyncIterator[str]:
    options = ("--model", MODEL_NAME)
    launch = LaunchOptions(engine="emulator", replicas=1, log_dir=log_dir, kv_tokens=KV_TOKENS, extra_args=options)
    async with Fleet(launch) as fleet:
        yield fleet.urls[0]


async def answer_to(question: str, url: str) -> tuple[int, str, list[Any]]:
    """Status, type of the content, and the answer; of a stream its events, without the line that ends it."""
    path, body = QUESTIONS[question]
    async with session() as http, http.request("GET" if body is None else "POST", f"{url}{path}", json=body) as answer:
        text = await answer.text()
        if answer.content_type != "text/event-stream":
            return answer.status, answer.content_type, [json.loads(text)]
        *events, end, nothing = text.split("\n\n")
        assert (end, nothing) == ("data: [DONE]", "")
        return answer.status, answer.content_type, [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("stand_in", [fake, emulated])
async def test_replicas_of_tests_and_emulated_ones_answer_as_vllm_does(
    stand_in: Any, vllm_pair: VllmPair, tmp_path: Path
) -> None:
    found: dict[str, Any] = {}
    async with stand_in(tmp_path) as url:
        for question in QUESTIONS:
            theirs, ours = await answer_to(question, vllm_pair.urls[0]), await answer_to(question, url)
            if ours[:2] != theirs[:2] or differences(ours[2], theirs[2]):
                found[question] = (ours[:2], theirs[:2], differences(ours[2], theirs[2]))
    assert found == {}


# KV events

KINDS = {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


@dataclass(frozen=True)
class Heard:
    """What a plain subscriber got, and then a plain client of replays, which asked for all: frames of messages."""

    live: list[list[bytes]]
    replayed: list[list[bytes]]

    def frames(self) -> tuple[set[int], set[int], set[int], list[bytes]]:
        """How many frames messages have and how long their numbers are, and the last message of a replay."""
        *replayed, end = self.replayed
        numbers = {len(frames[-2]) for frames in (*self.live, *replayed)}
        return {len(frames) for frames in self.live}, {len(frames) for frames in replayed}, numbers, end

    def differences(self, theirs: Heard) -> dict[str, Any]:
        ours, real = self._by_kind(), theirs._by_kind()
        found = {kind: differences(ours[kind], real[kind]) for kind in ours}
        return {kind: fields for kind, fields in found.items() if fields}

    def _by_kind(self) -> dict[str, list[Any]]:
        """The events by their kind, and the batches without them."""
        found: dict[str, list[Any]] = {}
        for frames in (*self.live, *self.replayed[:-1]):
            time, events, *rest = msgspec.msgpack.decode(frames[-1])
            found.setdefault("batch", []).append([time, *rest])
            for event in events:
                found.setdefault(event["type"], []).append(event)
        return found


async def heard(endpoints: KvEventEndpoints, provoke: Callable[[], Awaitable[None]]) -> Heard:
    """Listen until each kind of event has come. `provoke`: makes some, called again and again."""
    assert endpoints.replay is not None
    context = zmq.asyncio.Context()
    events, replays = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    events.setsockopt(zmq.SUBSCRIBE, b"")
    live: list[list[bytes]] = []
    replayed: list[list[bytes]] = []
    try:
        events.connect(endpoints.endpoint)
        replays.connect(endpoints.replay)
        async with asyncio.timeout(PATIENCE_S):
            while not {event["type"] for frames in live for event in msgspec.msgpack.decode(frames[-1])[1]} >= KINDS:
                await provoke()
                while await events.poll(100):
                    live.append(await events.recv_multipart())
            await replays.send_multipart([b"", (0).to_bytes(8, "big")])
            while not replayed or replayed[-1][-2] != END_OF_REPLAY:
                replayed.append(await replays.recv_multipart())
    finally:
        context.destroy(linger=0)
    return Heard(live, replayed)


async def heard_of_server(url: str) -> Heard:
    """A replica whose cache overflows, and then is emptied."""
    chance = random.Random()

    async def provoke() -> None:
        for _ in range(3):
            await replica.complete(prompt_of(chance.getrandbits(32), KV_TOKENS // 2))
        await replica.empties_cache()
        await replica.complete(prompt_of(chance.getrandbits(32), KV_TOKENS // 2))

    async with asked(VllmReplica, url) as replica, client_of(replica) as engine:
        return await heard(endpoints_of(engine), provoke)


async def test_scripted_kv_events_and_emulated_ones_have_the_form_of_vllms(vllm_pair: VllmPair, tmp_path: Path) -> None:
    async with ScriptedPublisher() as publisher:
        scripted = await heard(publisher.endpoints, lambda: publisher.publish(stored(1, 2), removed(1), cleared()))
    async with emulated(tmp_path) as url:
        of_emulator = await heard_of_server(url)
    real = await heard_of_server(vllm_pair.urls[1])
    assert scripted.frames() == of_emulator.frames() == real.frames()
    assert (scripted.differences(real), of_emulator.differences(real)) == ({}, {})


# starting


def test_a_program_that_refuses_its_arguments_does_so_as_vllm_does() -> None:
    require_vllm()
    ours, theirs = [
        subprocess.run(
            [*program, "serve", str(model), "--port", "1", "--nonsense"], capture_output=True, text=True, check=False
        )
        for program, model in (([sys.executable, FAKE_VLLM], "refuses"), ([VLLM], TINY_MODEL))
    ]
    assert ours.returncode == theirs.returncode
    [said] = ours.stderr.splitlines()
    assert said in theirs.stderr
