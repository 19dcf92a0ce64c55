"""The SGLang client and Preble's order inside SGLang, against a real replica on the CPU."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import pytest

from preble.core.types import namespace_of
from preble.core.waiting_queue import WaitingQueue
from preble.engines import connect
from preble.engines.kv_sockets import KvEventEndpoints
from preble.engines.sglang import SglangEngine, with_request_id
from support.arrangements import assert_cores_order
from support.belief import Belief, believing
from support.relay import TcpRelay
from support.replicas import (
    KV_TOKENS,
    MAX_MODEL_LEN,
    MODEL_NAME,
    PLACES,
    ROOT,
    SGLANG,
    RunningReplicas,
    prompt_of,
    require_sglang,
)
from support.waiting import eventually

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

PAGE = 16
BLOCKER_TOKENS = 600
ATTEMPTS = 5
LONG = 1900
"""Output tokens of a request that is still running, some seconds of work later, unless it was aborted."""


class Replica:
    """Plain questions to one SGLang replica, past all of our own code."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    async def complete(self, prompt: Sequence[int], max_tokens: int = 1, **more: Any) -> int:
        """Run a prompt. Returns the number of its tokens that were cached."""
        body = {"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": max_tokens, "ignore_eos": True, **more}
        async with self._session.post(f"{self.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            return int((await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def load(self, what: str) -> int:
        async with self._session.get(f"{self.url}/v1/loads") as response:
            return int((await response.json())["loads"][0][what])

    async def num_running(self) -> int:
        return await self.load("num_running_reqs")

    async def num_waiting(self) -> int:
        return await self.load("num_waiting_reqs")

    async def idle(self) -> None:
        async def nothing_is_left() -> bool:
            return await self.num_running() + await self.num_waiting() == 0

        await eventually(nothing_is_left, "the engine is idle")

    async def flush(self) -> None:
        """Empty the cache; the engine refuses while anything runs."""

        async def flushed() -> bool:
            async with self._session.post(f"{self.url}/flush_cache") as response:
                return response.status == 200

        await eventually(flushed, "the cache is flushed")


@pytest.fixture
async def replica(sglang_url: str) -> AsyncIterator[Replica]:
    """Idle, its cache empty."""
    async with aiohttp.ClientSession() as session:
        one = Replica(sglang_url, session)
        await one.idle()
        await one.flush()
        yield one


@pytest.fixture
async def engine(sglang_url: str) -> AsyncIterator[SglangEngine]:
    client = connect(sglang_url, "sglang")
    assert isinstance(client, SglangEngine)
    await client.probe()
    yield client
    await client.close()


@pytest.fixture
def endpoints(engine: SglangEngine) -> KvEventEndpoints:
    """As the engine itself tells them."""
    assert engine.kv_event_endpoints is not None
    return engine.kv_event_endpoints


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL_NAME, "prompt": "def main():", "ignore_eos": True, **fields}).encode()


async def read(engine: SglangEngine, body: bytes, path: str = "/v1/completions") -> tuple[int, bytes]:
    async with engine.send(path, body, {}) as response:
        return response.status, b"".join([chunk async for chunk in response.chunks()])


async def test_the_engine_is_recognised_and_tells_its_configuration(sglang_url: str) -> None:
    client = connect(sglang_url)
    info = await client.probe()
    assert (info.engine, info.models, info.version) == ("sglang", (MODEL_NAME,), "0.5.23")
    assert (info.max_model_len, info.spec.max_prompt_tokens) == (MAX_MODEL_LEN, MAX_MODEL_LEN)
    assert (info.spec.kv_capacity_tokens, info.spec.block_size) == (KV_TOKENS, PAGE)
    assert info.spec.reports_events
    assert client.kv_events() is not None
    await client.close()


async def test_a_readiness_check_computes_nothing(engine: SglangEngine, replica: Replica) -> None:
    computed = await replica.load("total_prefill_uncached_tokens")
    for _ in range(5):
        await engine.check_ready()
    assert await replica.load("total_prefill_uncached_tokens") == computed


async def test_answers_come_whole_and_streamed(engine: SglangEngine) -> None:
    status, body = await read(engine, completion(max_tokens=5))
    assert status == 200
    assert json.loads(body)["usage"]["completion_tokens"] == 5
    status, body = await read(engine, completion(max_tokens=5, stream=True))
    assert status == 200
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")


async def test_several_prompts_at_once_are_answered(engine: SglangEngine) -> None:
    status, body = await read(engine, completion(prompt=[[5, 6, 7], [8, 9]], max_tokens=2, n=2))
    assert status == 200, body
    assert len(json.loads(body)["choices"]) == 4


async def test_token_ids_are_the_engines_own(engine: SglangEngine) -> None:
    tokens = await engine.tokenize(completion())
    _, answer = await read(engine, completion(max_tokens=1))
    assert len(tokens) == json.loads(answer)["usage"]["prompt_tokens"] > 2


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_before_the_end_aborts_the_work(engine: SglangEngine, replica: Replica, stream: bool) -> None:
    work = asyncio.create_task(read(engine, completion(max_tokens=LONG, stream=stream)))

    async def runs() -> bool:
        return await replica.num_running() == 1

    await eventually(runs, "it runs")
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await replica.idle()
    assert await replica.load("num_used_tokens") < LONG, "it did not run to its end"


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_it_waits_takes_it_out_of_the_queue(
    engine: SglangEngine, replica: Replica, stream: bool
) -> None:
    async with asyncio.TaskGroup() as tasks:
        blockers = [tasks.create_task(replica.complete(prompt_of(90 + i, 8), BLOCKER_TOKENS)) for i in range(PLACES)]
        await eventually(lambda: all_run(replica, PLACES), "the blockers run")
        work = tasks.create_task(read(engine, completion(max_tokens=5, stream=stream)))
        await eventually(lambda: at_least(replica, 1, blockers[0]), "it waits")
        work.cancel()

        async def nobody_waits() -> bool:
            return await replica.num_waiting() == 0

        await eventually(nobody_waits, "it waits no longer")
        for blocker in blockers:
            blocker.cancel()


async def all_run(replica: Replica, count: int) -> bool:
    return await replica.num_running() == count


async def at_least(replica: Replica, number: int, blocker: asyncio.Task[int]) -> bool:
    return blocker.done() or await replica.num_waiting() >= number


async def predicted_and_found(
    belief: Belief, endpoints: KvEventEndpoints, replica: Replica, prompt: Sequence[int]
) -> tuple[int, int]:
    await belief.settled(endpoints)
    return belief.usable_tokens(prompt, PAGE), await replica.complete(prompt)


async def test_events_tell_what_is_cached_to_the_block(endpoints: KvEventEndpoints, replica: Replica) -> None:
    """Stores, shared beginnings, generated tokens and evictions, then a flush."""
    async with believing(endpoints) as belief:
        shared = prompt_of(1, 200)
        prompts = [[*shared[: 40 * (i % 6)], *prompt_of(10 + i, 150 + 37 * i % 200)] for i in range(20)]
        for prompt in prompts:
            await replica.complete(prompt, 12)
        hits = 0
        for prompt in [*prompts[::2], *reversed(prompts[::2])]:
            predicted, found = await predicted_and_found(belief, endpoints, replica, prompt)
            assert predicted == found
            hits += found > 0
        assert hits > 5
        assert len(belief) * PAGE <= KV_TOKENS, "evictions were told"
        assert belief.parent_missing == 0
        await replica.idle()
        await replica.flush()
        await eventually(lambda: len(belief) == 0, "a flush is told at once")
        assert await predicted_and_found(belief, endpoints, replica, prompts[-1]) == (0, 0)


async def test_a_missed_stretch_of_events_is_made_up_for(endpoints: KvEventEndpoints, replica: Replica) -> None:
    before, missed = prompt_of(7, 200), [prompt_of(520 + i, 290) for i in range(8)]
    async with (
        TcpRelay(endpoints.endpoint) as relay,
        believing(KvEventEndpoints(relay.address, endpoints.replay, endpoints.topic)) as belief,
    ):
        await replica.complete(before)
        await belief.settled(endpoints)
        position, starts_over = belief.stream.position, belief.stream.counters.starts_over
        await relay.cut()
        for prompt in missed:
            await replica.complete(prompt)
        assert belief.stream.position == position, "nothing came through"
        relay.mend()
        hits = 0
        for prompt in [*reversed(missed), before]:
            predicted, found = await predicted_and_found(belief, endpoints, replica, prompt)
            assert predicted == found
            hits += found > 0
        assert 0 < hits < 9, "some were evicted meanwhile"
        assert belief.stream.counters.starts_over == starts_over, "what was missed was asked for"


async def test_its_load_is_pushed_whoever_causes_it(engine: SglangEngine, replica: Replica) -> None:
    loads = engine.loads()
    assert loads is not None

    async def told(expected: tuple[int, int]) -> int:
        """Follow until so many are said to run and to wait. Returns the KV tokens in use then."""
        async with asyncio.timeout(60):
            async for load in loads:
                if load is not None and (load.running, load.waiting) == expected:
                    return load.kv_tokens
        raise AssertionError("the stream ended")

    assert await told((0, 0)) == 0, "what is only cached is not in use"
    async with asyncio.TaskGroup() as tasks:
        requests = [
            tasks.create_task(replica.complete(prompt_of(90 + i, 64), BLOCKER_TOKENS)) for i in range(PLACES + 1)
        ]
        assert await told((PLACES, 1)) >= PLACES * 64
        for request in requests:
            request.cancel()
    assert await told((0, 0)) == 0


@pytest.mark.slow
async def test_a_killed_engine_is_noticed_and_its_successor_followed(
    sglang: RunningReplicas, endpoints: KvEventEndpoints, replica: Replica
) -> None:
    prompt = prompt_of(9, 200)
    async with believing(endpoints) as belief:
        await replica.complete(prompt)
        assert await predicted_and_found(belief, endpoints, replica, prompt) == (192, 192)
        starts_over = belief.stream.counters.starts_over
        await sglang.kill(0)
        await sglang.start(0)
        await eventually(lambda: belief.stream.counters.starts_over > starts_over, "it is noticed", timeout_s=120.0)
        assert await predicted_and_found(belief, endpoints, replica, prompt) == (0, 0)
        assert await predicted_and_found(belief, endpoints, replica, prompt) == (192, 192)


async def test_prompts_with_a_cache_salt_are_told_apart(engine: SglangEngine, replica: Replica) -> None:
    prompt = prompt_of(8, 100)
    await replica.complete(prompt, cache_salt="pepper")
    await replica.complete(prompt)
    events = engine.kv_events()
    assert events is not None
    namespaces = set()
    async for event in events:
        namespaces.add(getattr(event, "namespace", None))
        if namespaces >= {"", namespace_of(cache_salt="pepper")}:
            break


async def served_order(replica: Replica, prompts: dict[str, list[int]]) -> list[str] | None:
    """The order in which requests are served that wait together; None where a blocker ended too early to tell."""
    done: list[str] = []

    async def send(name: str) -> None:
        await replica.complete(prompts[name], 2)
        done.append(name)

    async with asyncio.TaskGroup() as tasks:
        blockers = [
            tasks.create_task(replica.complete(prompt_of(90 + i, 8), BLOCKER_TOKENS, rid=f"blocker{i}"))
            for i in range(PLACES)
        ]
        await eventually(lambda: all_run(replica, PLACES), "the blockers run")
        async with asyncio.TaskGroup() as requests:
            for number, name in enumerate(prompts, 1):
                requests.create_task(send(name))
                await eventually(lambda number=number: at_least(replica, number, blockers[0]), f"{name} waits")
            in_time = not blockers[0].done()
            await abort(replica, "blocker0")
        in_time = in_time and not blockers[1].done()
        await abort(replica, "blocker1")
    return done if in_time else None


async def abort(replica: Replica, request_id: str) -> None:
    async with replica._session.post(f"{replica.url}/abort_request", json={"rid": request_id}) as response:
        assert response.status == 200


async def test_hits_are_served_first(replica: Replica) -> None:
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
        await replica.idle()
    pytest.fail(
        f"in {ATTEMPTS} attempts the queue never was complete before a request of {BLOCKER_TOKENS} tokens ended"
    )


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What the scenarios of `inside_sglang.py` saw, by name."""
    require_sglang()
    program = [str(SGLANG), str(ROOT / "tests" / "support" / "inside_sglang.py")]
    finished = subprocess.run(program, capture_output=True, text=True, check=False, timeout=500)
    assert finished.returncode == 0, finished.stderr[-4000:]
    scenarios: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return scenarios


def test_every_arrangement_is_the_order_of_cores_waiting_queue(seen: dict[str, Any]) -> None:
    churn = seen["churn"]["rust"]
    assert churn["core"] == "RustUnifiedTreeCore", "SGLang's default"
    assert any(record["in_front"] for record in churn["records"]), "some were retracted"
    assert_cores_order(churn["records"])


def test_slower_trees_are_asked_less_often_and_order_all_the_same(seen: dict[str, Any]) -> None:
    for record in seen["churn"]["python"]["records"]:
        waiting = [name for name, _, _ in record["waiting"]]
        assert sorted(record["arranged"]) == sorted(waiting)
        assert record["arranged"][: len(record["in_front"])] == record["in_front"]


def test_hits_without_end_starve_a_miss_under_lpm_and_not_under_groups(seen: dict[str, Any]) -> None:
    groups, lpm = seen["groups"], seen["lpm"]
    assert groups["served"][-1] == "miss"
    assert len(groups["served"]) <= groups["max_picks"]
    assert "miss" not in lpm["served"]


def test_looking_at_a_prompt_does_not_keep_it_in_the_cache(seen: dict[str, Any]) -> None:
    assert seen["looking_is_no_use"] == [0, 160], "the older one was evicted, although it waited and was looked at"


def test_an_order_of_sglangs_own_is_refused_with_the_remedy(seen: dict[str, Any]) -> None:
    assert len(seen["refusals"]) == 2
    assert all("--schedule-policy fcfs" in message for message in seen["refusals"])


async def test_120_requests_in_a_tiny_cache_with_disconnects_leave_nothing(replica: Replica) -> None:
    prefixes = [prompt_of(400 + i, 256) for i in range(3)]

    async def run(number: int) -> int:
        tail, output = (650, 60) if number % 10 == 0 else (40, 4)
        return await replica.complete([*prefixes[number % 3], *prompt_of(500 + number, tail)], output)

    async with asyncio.TaskGroup() as tasks:
        requests = [tasks.create_task(run(number)) for number in range(120)]
        await eventually(lambda: at_least(replica, 90, requests[-1]), "most of them wait")
        left = [request for request in requests[5::9] if request.cancel()]
    assert left and all(request.cancelled() for request in left)
    await replica.idle()
    await replica.flush()
    assert await replica.load("num_used_tokens") == 0


async def test_hits_without_end_do_not_starve_a_miss(replica: Replica) -> None:
    hot = prompt_of(700, 512)
    await replica.complete(hot)
    hits = 0

    async def send_hits(first: int, until: asyncio.Task[int]) -> None:
        nonlocal hits
        while not until.done():
            await replica.complete([*hot, *prompt_of(first + hits, 20)])
            hits += 1

    async def miss_behind_hits() -> int:
        async def hits_wait() -> bool:
            return await replica.num_waiting() >= 4

        await eventually(hits_wait, "hits wait")
        return await replica.complete(prompt_of(800, 296))

    async with asyncio.TaskGroup() as tasks:
        miss = tasks.create_task(miss_behind_hits())
        for i in range(12):
            tasks.create_task(send_hits(10_000 * (i + 1), miss))
    bound = WaitingQueue(lambda item: 0).max_picks(num_older=12)
    assert bound is not None and hits <= bound


@pytest.mark.parametrize(
    "body",
    [b'{"prompt": ["a", "b"]}', b'{"prompt": [ [1], [2]]}', b'{"prompt": "a", "n": 2}', b'{"rid": "x"}', b"{}", b"no"],
)
def test_a_body_that_one_id_does_not_fit_is_left_as_it_is(body: bytes) -> None:
    assert with_request_id(body, "id") is None


@pytest.mark.parametrize("body", [b'{"prompt": "a"}', b' { "prompt": [1, 2], "n": 1}', b'{"messages": []}'])
def test_the_id_is_added_to_what_the_body_says(body: bytes) -> None:
    named = with_request_id(body, "id")
    assert named is not None
    assert json.loads(named) == {"rid": "id", **json.loads(body)}
