"""One replica computes a prompt, another one fetches its KV and decodes: what vLLM does, failures included."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from preble.config import ParityConfig, ReplicaConfig
from preble.core.types import ReplicaId
from preble.emulator import EmulatorConfig, EmulatorServer
from preble.engines import connect
from preble.engines.http import HttpClient
from preble.engines.kv_events.sockets import KvEventEndpoints
from preble.engines.kv_events.wire import WireStored
from preble.engines.starting.ports import free_ports
from preble.engines.vllm.client import VllmEngine
from preble.lab.profiling.link import LinkMeasuring
from support.belief import newest_message, raw_events
from support.gateways import gateway_before, idle
from support.linked import KV_BYTES, linked_profile
from support.nixl_vllm import LEASE_S, counted, in_use, nixl_vllm, num_requests
from support.questions import VllmReplica, asked
from support.replicas import BLOCK_SIZE, KV_TOKENS, MODEL_NAME, TEST_TIMEOUT_S, RunningReplicas, running
from support.split_burst import NUM_CLIENTS, SplitBurst
from support.splitting import always_splitting
from support.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]

WHOLE = 20 * BLOCK_SIZE
HALF = WHOLE // 2
LENGTH = WHOLE + 5
KV_BYTES_OF_TINY = 2048
"""Of a token's KV in the real model."""
GREEDY = {"temperature": 0, "max_tokens": 24}


@dataclass(frozen=True)
class Seen:
    """What a split did. `computed`: tokens, by the source and by the target. `fetched`: tokens, also from the bytes.
    `cached`: as the answer has it. `stored`: blocks that each has announced, also what it had computed before, and the
    source for the one answer to which the split's is compared. `is_right`: they are equal.
    """

    computed: tuple[float, float]
    fetched: tuple[float, float]
    cached: int
    stored: tuple[int, int] = (20, 20)
    is_right: bool = True


@dataclass(frozen=True)
class Step:
    """A prompt of which both have computed some tokens before. `more`: of the client's body."""

    name: str
    at_source: int
    at_target: int
    seen: Seen
    length: int = LENGTH
    more: Mapping[str, Any] = field(default_factory=dict)


_COLD = Seen((LENGTH, 0), (LENGTH, LENGTH + 27), 0)
STEPS = (
    Step("nothing is cached", 0, 0, _COLD),
    Step("all is cached", WHOLE, WHOLE, Seen((5, 0), (5, 32), WHOLE)),
    Step("both have the half", HALF, HALF, Seen((HALF + 5, 0), (HALF + 5, HALF + 32), HALF)),
    Step("the target has the half", 0, HALF, Seen((LENGTH, 0), (HALF + 5, HALF + 32), 0)),
    Step("the source has it", WHOLE, 0, Seen((5, 0), (LENGTH, LENGTH + 27), WHOLE)),
    Step("whole blocks", WHOLE, 0, Seen((32, 0), (WHOLE, WHOLE), WHOLE - 32, (22, 20)), WHOLE),
    Step("one token more", WHOLE, 0, Seen((1, 0), (WHOLE + 1, WHOLE + 32), WHOLE), WHOLE + 1),
    Step("less than a block", 0, 0, Seen((4, 0), (4, 32), 0, (0, 0)), 4),
    Step("drawn", 0, 0, _COLD, more={"temperature": 1.0, "seed": 7}),
    Step("a stream", 0, 0, _COLD, more={"stream": True, "stream_options": {"include_usage": True}}),
    Step("with the prompt", 0, 0, Seen((LENGTH, LENGTH), (0, 0), 0, (40, 20)), more={"echo": True, "logprobs": 1}),
)
"""Blocks have 32 tokens. Who is asked for the prompt's probabilities computes it, whatever it could fetch."""


@dataclass(frozen=True)
class Pair:
    """Two replicas, real or emulated, of which the second fetches from the first. `kv_bytes`: of a token."""

    source: str
    target: str
    kv_bytes: int
    is_real: bool

    async def post(self, url: str, prompt: list[int], **more: Any) -> tuple[int, dict[str, Any]]:
        body = {"model": MODEL_NAME, "prompt": prompt, **GREEDY, **more}
        async with aiohttp.ClientSession(url) as http, http.post("/v1/completions", json=body) as answer:
            return answer.status, await answer.json()

    async def ask(self, url: str, prompt: list[int], **more: Any) -> dict[str, Any]:
        status, answer = await self.post(url, prompt, **more)
        assert status == 200, answer
        return answer

    async def chat(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        body = {"model": MODEL_NAME, **GREEDY, **body}
        async with aiohttp.ClientSession(url) as http, http.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def take_all(self) -> dict[str, Seen]:
        """Take every step, and say what was seen."""
        await self.emptied()
        endpoints = [await _endpoints(url) for url in (self.source, self.target)]
        since = [await newest_message(one) + 1 for one in endpoints]
        rng = Random(26)
        prompts = {step.name: rng.choices(range(100, 4000), k=step.length) for step in STEPS}
        seen = {step.name: await self._take(step, prompts[step.name]) for step in self.steps}
        stored = [await _stored(*one, prompts) for one in zip(endpoints, since, strict=True)]
        return {name: replace(one, stored=(stored[0][name], stored[1][name])) for name, one in seen.items()}

    @property
    def steps(self) -> list[Step]:
        return [step for step in STEPS if self.is_real or "echo" not in step.more]

    async def _take(self, step: Step, prompt: list[int]) -> Seen:
        await self.have(self.source, prompt[: step.at_source])
        await self.have(self.target, prompt[: step.at_target])
        urls = (self.source, self.target)
        before = [await counted(url) for url in urls]
        params = await self.offered(prompt)
        assert params["remote_num_tokens"] == step.length
        answer = await self.told(self.target, prompt, **step.more, kv_transfer_params=params)
        await self.is_free()
        source, target = [(await counted(url)).since(one) for url, one in zip(urls, before, strict=True)]
        assert source.fetched == 0
        return Seen(
            (source.computed, target.computed),
            (target.fetched, target.num_bytes / self.kv_bytes),
            answer["usage"]["prompt_tokens_details"]["cached_tokens"],
            is_right=answer["choices"] == (await self.told(self.source, prompt, **step.more))["choices"],
        )

    async def told(self, url: str, prompt: list[int], **more: Any) -> dict[str, Any]:
        """Ask, and return the usage and the choices, also of a stream."""
        if "stream" not in more:
            return await self.ask(url, prompt, **more)
        body = {"model": MODEL_NAME, "prompt": prompt, **GREEDY, **more}
        async with aiohttp.ClientSession(url) as http, http.post("/v1/completions", json=body) as answer:
            lines = (await answer.read()).split(b"\n\n")
        events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]
        texts = [choice["text"] for event in events for choice in event["choices"]]
        return {"usage": events[-1]["usage"], "choices": "".join(texts)}

    async def have(self, url: str, prompt: list[int]) -> None:
        """Have it compute these whole blocks."""
        if prompt:
            await self.ask(url, [*prompt, 1], max_tokens=1)

    async def offered(self, prompt: list[int]) -> dict[str, Any]:
        """Have the source compute a prompt, and return with what it can be fetched."""
        params = {"do_remote_decode": True}
        return (await self.ask(self.source, prompt, max_tokens=1, kv_transfer_params=params))["kv_transfer_params"]

    async def emptied(self) -> None:
        """Have both forget what they have cached."""
        for url in (self.source, self.target):
            await self.forget(url)

    async def forget(self, url: str) -> None:
        async with asked(VllmReplica, url):
            pass

    async def is_free(self) -> None:
        for url in (self.source, self.target):
            await eventually(partial(_is_idle, url), "it keeps no blocks")


def of_whole_blocks(step: Step) -> Seen:
    """Return what the emulator does: it fetches whole blocks, and computes the rest, at least one token."""
    seen, whole = step.seen, (step.length - 1) // BLOCK_SIZE * BLOCK_SIZE
    used, sent = whole - step.at_target, step.length // BLOCK_SIZE * BLOCK_SIZE - step.at_target
    stored = tuple(min(number, WHOLE // BLOCK_SIZE) for number in seen.stored)  # nothing that it computes again
    return Seen((seen.computed[0], step.length - whole), (used, sent), seen.cached, stored, seen.is_right)


async def _is_idle(url: str) -> bool:
    return await in_use(url) == 0 and await num_requests(url) == 0


async def _stored(endpoints: KvEventEndpoints, since: int, prompts: Mapping[str, list[int]]) -> Counter[str]:
    """Return how many blocks of each prompt a replica has announced."""
    count: Counter[str] = Counter()
    for event in await raw_events(endpoints, since):
        if isinstance(event, WireStored):
            for i in range(len(event.block_hashes)):
                block = list(event.token_ids)[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]
                count.update(name for name, prompt in prompts.items() if _has(prompt, block))
    return count


def _has(prompt: list[int], block: list[int]) -> bool:
    return any(prompt[i : i + BLOCK_SIZE] == block for i in range(0, len(prompt), BLOCK_SIZE))


async def _endpoints(url: str) -> KvEventEndpoints:
    engine = VllmEngine(HttpClient(url, ReplicaId(url)), None)
    try:
        [found] = await engine._ask_endpoints()
        return found
    finally:
        await engine.close()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningReplicas]:
    """Of which the last is there to be killed in a burst."""
    folder, ports = tmp_path_factory.mktemp("nixl"), free_ports(3)
    fleets = [nixl_vllm(folder / str(port), port) for port in ports]
    with running(*fleets) as loop:
        yield RunningReplicas(tuple(fleet.replicas[0] for fleet in fleets), loop)


@pytest.fixture(scope="module")
def replicas(three: RunningReplicas) -> RunningReplicas:
    return RunningReplicas(three.replicas[:2], three.loop)


@pytest.fixture(params=("emulated", "real"))
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    if request.param == "real":
        replicas = request.getfixturevalue("replicas")
        replicas.revive()
        yield Pair(*replicas.urls, KV_BYTES_OF_TINY, is_real=True)
        return
    profile = linked_profile(tmp_path, s_per_token=1e-6, bytes_per_s=1e9, latency_s=1e-3)
    config = EmulatorConfig(
        profile=str(profile),
        model=MODEL_NAME,
        kv_tokens=KV_TOKENS,
        block_size=BLOCK_SIZE,
        events_port=0,
        nixl=True,
        lease_s=LEASE_S,
    )
    async with AsyncExitStack() as stack:
        source, target = [await stack.enter_async_context(EmulatorServer(config)) for _ in range(2)]
        yield Pair(source.url, target.url, KV_BYTES, is_real=False)


async def test_what_each_computes_sends_and_says(pair: Pair) -> None:
    expected = {step.name: step.seen if pair.is_real else of_whole_blocks(step) for step in pair.steps}
    assert await pair.take_all() == expected


async def test_a_chat_is_as_from_one_replica(pair: Pair) -> None:
    await pair.emptied()
    chat = {"messages": [{"role": "user", "content": " ".join(map(str, range(40)))}]}
    capped = {**chat, "max_completion_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    params = (await pair.chat(pair.source, capped))["kv_transfer_params"]
    split = await pair.chat(pair.target, {**chat, "kv_transfer_params": params})
    assert split["choices"] == (await pair.chat(pair.source, chat))["choices"]


async def test_a_source_that_streams_loses_what_it_offers(pair: Pair) -> None:
    await pair.emptied()
    prompt = Random(1).choices(range(100, 4000), k=LENGTH)
    body = {"model": MODEL_NAME, "prompt": prompt, **GREEDY, "max_tokens": 1, "stream": True}
    body["kv_transfer_params"] = {"do_remote_decode": True}
    async with aiohttp.ClientSession(pair.source) as http, http.post("/v1/completions", json=body) as answer:
        assert "remote_block_ids" not in await answer.text()
    assert await in_use(pair.source) > 0, "and the blocks are kept until the lease ends"
    await pair.is_free()


async def test_what_nobody_fetches_is_kept_until_its_lease_ends(pair: Pair) -> None:
    await pair.emptied()
    prompt = Random(2).choices(range(100, 4000), k=LENGTH)
    began = asyncio.get_running_loop().time()
    params = await pair.offered(prompt)
    async with aiohttp.ClientSession(pair.source) as http, http.post("/reset_prefix_cache") as answer:
        assert answer.status == 200, "though nothing is forgotten"
    assert (await pair.ask(pair.source, prompt))["usage"]["prompt_tokens_details"]["cached_tokens"] == WHOLE
    assert await num_requests(pair.source) == 0
    assert await in_use(pair.source) > 0
    await pair.is_free()
    assert asyncio.get_running_loop().time() - began >= LEASE_S

    for _ in range(4 * KV_TOKENS // 1000):
        await pair.ask(pair.source, Random().choices(range(100, 4000), k=1000), max_tokens=1)
    status, answer = await pair.post(pair.target, prompt, kv_transfer_params=params)
    assert status == 200
    right = (await pair.ask(pair.source, prompt))["choices"]
    assert answer["choices"] != right, "nobody says that the KV is another's"
    is_wrong = (await pair.ask(pair.target, prompt))["choices"] != right
    assert is_wrong == pair.is_real, "it is cached there from then on; the emulator forgets it"


async def test_two_that_fetch_the_same_at_once_are_both_right(pair: Pair) -> None:
    await pair.emptied()
    prompt = Random(3).choices(range(100, 4000), k=LENGTH)
    params = await pair.offered(prompt)
    both = await asyncio.gather(*(pair.ask(pair.target, prompt, kv_transfer_params=params) for _ in range(2)))
    plain = await pair.ask(pair.source, prompt)
    assert [answer["choices"] for answer in both] == 2 * [plain["choices"]]
    drawn = {"n": 2, "temperature": 1.0, "seed": 7}
    fetched = await pair.ask(pair.target, prompt, **drawn, kv_transfer_params=await pair.offered(prompt))
    assert fetched["choices"] == (await pair.ask(pair.source, prompt, **drawn))["choices"]
    swapped = replace(pair, source=pair.target, target=pair.source)  # no role is fixed
    prompt = Random(6).choices(range(100, 4000), k=LENGTH)
    params, before = await swapped.offered(prompt), await counted(swapped.target)
    answer = await swapped.ask(swapped.target, prompt, kv_transfer_params=params)
    assert (await counted(swapped.target)).since(before).fetched >= WHOLE
    assert answer["choices"] == (await swapped.ask(swapped.source, prompt))["choices"]
    await pair.is_free()


async def test_a_client_that_leaves_while_the_target_decodes_leaves_nothing(pair: Pair) -> None:
    await pair.emptied()
    prompt = Random(4).choices(range(100, 4000), k=LENGTH)
    params = await pair.offered(prompt)
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1300, "stream": True, "ignore_eos": True}
    body["kv_transfer_params"] = params
    async with aiohttp.ClientSession(pair.target) as http, http.post("/v1/completions", json=body) as answer:
        await answer.content.readany()
        await eventually(partial(_is_idle, pair.source), "the source has let go before the answer's end", 3.0)
        assert await num_requests(pair.target) == 1
    await pair.is_free()


async def test_a_source_that_cannot_be_reached_costs_its_request_nothing(pair: Pair) -> None:
    await pair.emptied()
    prompt = Random(5).choices(range(100, 4000), k=LENGTH)
    right = await pair.ask(pair.source, prompt)
    params = await pair.offered(prompt) | {"remote_engine_id": "unknown", "remote_port": free_ports(1)[0]}
    before = await counted(pair.target)
    answer = await pair.ask(pair.target, prompt, kv_transfer_params=params)
    assert answer["choices"] == right["choices"]
    assert (await counted(pair.target)).since(before).computed == LENGTH
    await pair.is_free()


async def test_a_prefix_is_copied_in_two_steps(pair: Pair) -> None:
    await pair.emptied()
    prompt = Random(7).choices(range(100, 4000), k=WHOLE + 100)
    prefix = prompt[: WHOLE + 1]
    right = await pair.ask(pair.source, prompt)
    await pair.ask(pair.target, prefix, max_tokens=1, kv_transfer_params=await pair.offered(prefix))
    before = await counted(pair.target)
    answer = await pair.ask(pair.target, prompt)
    assert answer["choices"] == right["choices"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == WHOLE
    assert (await counted(pair.target)).since(before).computed == 100
    await pair.is_free()


async def test_the_link_between_the_two_is_measured(pair: Pair) -> None:
    servers = connect(pair.source), connect(pair.target)
    try:
        found = await LinkMeasuring(*servers, seed=7, quick=True, max_tokens=HALF).run()
    finally:
        for server in servers:
            await server.close()
    assert found.kv_bytes_per_token == pair.kv_bytes
    assert [times.tokens for times in found.copies] == [32, 64, 160, 320]


async def test_a_gateway_splits_between_real_replicas(replicas: RunningReplicas, tmp_path: Path) -> None:
    replicas.revive()
    pair = Pair(*replicas.urls, KV_BYTES_OF_TINY, is_real=True)
    profile = linked_profile(tmp_path, s_per_token=0.1, bytes_per_s=1e9, latency_s=0.01)
    parity = ParityConfig(answer_s=300.0, events_s=300.0)
    configs = [ReplicaConfig(url) for url in replicas.urls]
    async with gateway_before(configs, always_splitting(profile, pair.target), parity=parity) as gateway:
        links = gateway.serving.scheduler._cluster.links
        await eventually(lambda: links.groups, "a split prompt was answered as its source does", 300.0)
        groups = {replica.info.spec.transfer_group for replica in gateway.serving.replicas.values()}
        [group] = groups
        assert group.startswith("nixl torch.") and " auto vllm " in group, "its data types, by its words"
        rng = Random(9)

        async def was_fetched() -> bool:
            """Whatever became of it, the text is right: on a busy machine the source may be late, and rests then."""
            prompt, before = rng.choices(range(100, 4000), k=LENGTH), await counted(pair.target)
            answer = await pair.ask(gateway.url, prompt)
            assert answer["choices"] == (await pair.ask(pair.source, prompt))["choices"]
            return (await counted(pair.target)).since(before).fetched >= LENGTH

        await eventually(was_fetched, "one computes and the other one decodes")
        await idle(gateway)


async def test_a_burst_while_a_target_and_clients_go_has_right_answers_and_leaves_nothing(
    three: RunningReplicas, tmp_path: Path
) -> None:
    """The source goes in the next test, which ends the file. Many more go in benchmarks/repro/real_kills.py."""
    async with bursting(three, tmp_path) as burst:
        for goes in (None, None, "target"):
            await eventually(partial(burst.round, goes), "some are split", TEST_TIMEOUT_S)
        assert burst.ends["right"] >= NUM_CLIENTS
        await burst.nothing_is_left(2 * LEASE_S + PATIENCE_S)


@asynccontextmanager
async def bursting(replicas: RunningReplicas, folder: Path) -> AsyncIterator[SplitBurst]:
    """Let a gateway split every request that it can, the last of these decoding."""

    async def kill(url: str) -> None:
        await replicas.kill(replicas.urls.index(url))

    profile = linked_profile(folder, s_per_token=0.1, bytes_per_s=1e9, latency_s=0.01)
    configs = [ReplicaConfig(url) for url in replicas.urls]
    async with gateway_before(configs, always_splitting(profile, replicas.urls[-1])) as gateway:
        burst = SplitBurst(gateway, replicas.urls, Random(26), kill, LENGTH)
        await burst.know(replicas.urls[0])
        yield burst
        await idle(gateway)


@pytest.mark.parametrize("pair", ["real"], indirect=True)
async def test_last_a_dead_source_costs_nothing_and_what_a_shorter_prompt_offers_ends_the_target(
    pair: Pair, replicas: RunningReplicas, tmp_path: Path
) -> None:
    """Both end here, so this is the last test of the file. A rerun starts them anew."""
    await pair.emptied()
    prompt = Random(8).choices(range(100, 4000), k=LENGTH)
    right = await pair.ask(pair.source, prompt)
    async with bursting(replicas, tmp_path) as burst:
        await eventually(burst.round, "the two have met", TEST_TIMEOUT_S)
        shorter, params = await pair.offered(prompt[:HALF]), await pair.offered(prompt)
        await eventually(partial(burst.round, "source"), "some are split", TEST_TIMEOUT_S)
        await burst.nothing_is_left(2 * LEASE_S + PATIENCE_S)
    answer = await pair.ask(pair.target, prompt, kv_transfer_params=params)
    assert answer["choices"] == right["choices"]
    await pair.forget(pair.target)
    with suppress(aiohttp.ClientError):
        status, _ = await pair.post(pair.target, prompt, kv_transfer_params=shorter)
        assert status == 500
    await eventually(lambda: not replicas.replicas[1].is_alive, "its engine has ended")
