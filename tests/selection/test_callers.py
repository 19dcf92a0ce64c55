"""Programs that carry the bytes themselves, as Ray's router does: one process asks, others report, one dies."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from preble.config import AuthConfig
from preble.engines.starting.launch import Fleet, LaunchOptions
from selection.conftest import Select, Selecting
from support.waiting import eventually

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "selection-service.md"
DOCUMENTS = [list(range(1000 * start, 1000 * start + 320)) for start in range(1, 5)]
WAITS_FOR_EVER = """
selector = Selector("{url}")
selector.carry({tokens}, lambda endpoint, report: (report(1), input()))
"""


def client_of_the_page() -> str:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    found: str = code
    return found


@asynccontextmanager
async def emulated(select: Select, log_dir: Path, **changes: Any) -> AsyncIterator[tuple[Selecting, list[str]]]:
    launch = LaunchOptions(engine="emulator", replicas=2, log_dir=log_dir)
    async with Fleet(launch) as fleet, select(list(fleet.urls), engine="vllm", **changes) as one:
        yield one, list(fleet.urls)


async def test_the_questions_of_the_page_are_answered(select: Select, tmp_path: Path) -> None:
    asked = re.findall(r"^curl http://127\.0\.0\.1:8092(\S+) -d '(.+?)'$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert [path for path, _ in asked] == 2 * ["/select_and_reserve"]
    async with emulated(select, tmp_path) as (one, urls):
        for path, body in asked:
            status, held = await one.post(path, **json.loads(body))
            assert status == 200 and held["endpoint"] in urls, held
            await one.post(f"/reservations/{held['selection_id']}/end", output_tokens=1)


class Reports:
    """The engines' side: what happens to requests, reported in batches by another program than the one that asked."""

    def __init__(self, url: str) -> None:
        self._http = aiohttp.ClientSession(url)
        self.queue: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()

    async def run(self) -> None:
        while True:
            path, fields = await self.queue.get()
            async with self._http.post(path, json=fields) as answer:
                assert answer.status == 200, await answer.text()
            self.queue.task_done()

    async def close(self) -> None:
        await self.queue.join()
        await self._http.close()


async def carry(one: Selecting, reports: Reports, prompt: list[int]) -> str:
    """Ask where a prompt goes, send it there, and have its first token and its end reported. Returns the endpoint."""
    status, held = await one.post("/select_and_reserve", token_ids=prompt, expected_output_tokens=4)
    assert status == 200, held
    path, endpoint = f"/reservations/{held['selection_id']}", str(held["endpoint"])
    body = {"prompt": prompt, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    async with aiohttp.ClientSession(endpoint) as http, http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200
        await answer.content.readline()
        reports.queue.put_nowait((f"{path}/prefill_complete", {}))
        await answer.read()
    reports.queue.put_nowait((f"{path}/end", {"output_tokens": 4}))
    return endpoint


async def test_callers_share_one_scheduler_and_leave_nothing_in_flight(select: Select, tmp_path: Path) -> None:
    async with emulated(select, tmp_path) as (one, urls):
        reports = Reports(one.url)
        reporting = asyncio.create_task(reports.run())

        async def caller(number: int) -> list[str]:
            return [await carry(one, reports, [*document, number, turn]) for turn in range(2) for document in DOCUMENTS]

        went = await asyncio.gather(*map(caller, range(3)))
        await reports.close()
        reporting.cancel()
        assert len(one.service.reservations) == 0
        await one.idle()
        assert {endpoint for endpoints in went for endpoint in endpoints} <= set(urls)
        second_turns = {tuple(endpoints[len(DOCUMENTS) :]) for endpoints in went}
        assert len(second_turns) == 1, "each document stays where it is cached, whoever asks"
        outcomes = [decision.outcome for decision in one.serving.recent.latest(100)]
        assert outcomes == ["ok"] * (3 * 2 * len(DOCUMENTS))


async def test_what_is_cached_is_seen_whichever_key_asks(select: Select, tmp_path: Path, auth: AuthConfig) -> None:
    async with emulated(select, tmp_path, auth=auth) as (one, urls):
        body = {"prompt": DOCUMENTS[0], "max_tokens": 1}
        async with aiohttp.ClientSession(urls[0]) as http, http.post("/v1/completions", json=body) as answer:
            assert answer.status == 200

        async def is_seen() -> bool:
            _, chosen = await one.ask("POST", "/select", "key-r", token_ids=DOCUMENTS[0])
            return chosen["endpoint"] == urls[0] and chosen["overlap"]["gpu"] > 0

        await eventually(is_seen)


async def test_a_caller_that_is_killed_leaves_nothing_in_flight(select: Select, tmp_path: Path) -> None:
    async with emulated(select, tmp_path) as (one, _):
        code = client_of_the_page() + WAITS_FOR_EVER.format(url=one.url, tokens=DOCUMENTS[0])
        caller = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE)
        await eventually(lambda: [held.output_tokens for held in one.service.reservations.values()] == [1])
        caller.kill()
        await caller.wait()
        [selection_id] = one.service.reservations
        assert one.serving.num_in_flight == 1, "nobody has told the service"
        await one.post(f"/reservations/{selection_id}/renew", lease_s=0.05)  # its lease is nearly over
        await eventually(lambda: one.serving.num_in_flight == 0)
        assert one.outcomes(selection_id) == ["aborted"] and one.service.reservations.num_expired == 1
        assert (await one.post(f"/reservations/{selection_id}/end"))[0] == 404


@pytest.mark.parametrize("fails", [False, True])
async def test_the_client_of_the_page_ends_what_it_reserves(select: Select, tmp_path: Path, fails: bool) -> None:
    code = client_of_the_page()
    assert len([line for line in code.splitlines() if line]) <= 20
    names: dict[str, Any] = {}
    exec(code, names)

    def send(endpoint: str, report: Any) -> int:
        report(2)
        if fails:
            raise ConnectionError(endpoint)
        return 5

    async with emulated(select, tmp_path) as (one, _):
        try:
            sent = await asyncio.to_thread(names["Selector"](one.url).carry, DOCUMENTS[0], send)
            assert sent == 5 and not fails
        except ConnectionError:
            assert fails
        [decision] = one.serving.recent.latest(10)
        assert (decision.outcome, decision.output_tokens) == (("engine_gone", 2) if fails else ("ok", 5))
