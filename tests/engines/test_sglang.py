"""What only SGLang does, a real replica on the CPU, and Preble's order inside it (`support/inside_sglang.py`).

What every engine does: test_real_engines.py, test_waiting_requests.py.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from preble.engines import Engine
from preble.engines.adapter import EngineLoad
from preble.engines.kv_events.sockets import KvEventEndpoints
from preble.engines.sglang.bodies import with_request_id
from support.arrangements import assert_cores_order
from support.belief import believing, predicted_and_found
from support.questions import SglangReplica, asked, completion, prompt_of, read
from support.replicas import PLACES, ROOT, SGLANG, TEST_TIMEOUT_S, require_sglang
from support.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TEST_TIMEOUT_S)]

SOME_TOKENS = 600


@pytest.fixture
async def replica(sglang_url: str) -> AsyncIterator[SglangReplica]:
    """With nothing in it."""
    async with asked(SglangReplica, sglang_url) as one:
        yield one


async def test_a_readiness_check_computes_nothing(engine: Engine, replica: SglangReplica) -> None:
    computed = await replica.load("total_prefill_uncached_tokens")
    for _ in range(5):
        await engine.check_ready()
    assert await replica.load("total_prefill_uncached_tokens") == computed


async def test_several_prompts_at_once_are_answered(engine: Engine) -> None:
    status, body = await read(engine, completion(prompt=[[5, 6, 7], [8, 9]], max_tokens=2, n=2))
    assert status == 200, body
    assert len(json.loads(body)["choices"]) == 4


async def test_token_ids_are_the_engines_own(engine: Engine) -> None:
    tokens = await engine.tokenize(completion())
    _, answer = await read(engine, completion(max_tokens=1))
    assert len(tokens) == json.loads(answer)["usage"]["prompt_tokens"] > 2


async def test_a_flush_is_reported_at_once(endpoints: KvEventEndpoints, replica: SglangReplica) -> None:
    prompt = prompt_of(1, 200)
    async with believing(endpoints) as belief:
        await replica.complete(prompt)
        await belief.settled(endpoints)
        assert len(belief) > 0
        await replica.emptied()
        await eventually(lambda: len(belief) == 0, "the flush is reported")
        assert await predicted_and_found(belief, endpoints, replica, prompt) == (0, 0)


async def test_its_load_is_pushed_whoever_causes_it(engine: Engine, replica: SglangReplica) -> None:
    loads = engine.loads()
    assert loads is not None

    async def told(is_right: Callable[[EngineLoad], bool]) -> None:
        """Follow until such a load is reported."""
        async with asyncio.timeout(PATIENCE_S):
            async for load in loads:
                if load is not None and is_right(load):
                    return

    async def ask_on(number: int) -> None:
        while True:
            await replica.complete(prompt_of(90 + number, 64), SOME_TOKENS)

    nothing = EngineLoad(running=0, waiting=0, kv_tokens=0)
    await told(lambda load: load == nothing)
    requests = [asyncio.create_task(ask_on(number)) for number in range(PLACES + 1)]
    await told(lambda load: (load.running, load.waiting) == (PLACES, 1) and load.kv_tokens >= PLACES * 64)
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    await told(lambda load: load == nothing)  # what is only cached is not in use


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
