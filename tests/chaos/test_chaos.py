"""A short form of `make chaos`: everything goes wrong once, and the clients notice nothing that they should not."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from chaos.__main__ import rows, table
from chaos.clients import TENANTS, Clients, Questions
from chaos.run import Plan, Result, run
from chaos.script import KINDS
from preble.emulator.answers.tokenizer import BuiltinTokenizer

ROOT = Path(__file__).parents[2]
EMULATED = "chaos-0"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="fills a disk with prlimit")
async def test_everything_goes_wrong_once_and_no_request_pays_for_it(tmp_path: Path) -> None:
    result = await run(Plan(seed=2, rate=60.0, at_once=24, replicas=3, hold=20, calm=10), tmp_path, print)
    assert result.faults == dict.fromkeys(KINDS, 1)
    assert result.is_good, table(result)
    assert result.ends["ok"] >= 30 * len(KINDS)
    assert result.flood["ok"] > 0


def test_the_page_of_failures_shows_the_kept_result() -> None:
    kept = msgspec.json.decode((ROOT / "benchmarks" / "results" / "chaos.json").read_bytes(), type=Result)
    page = (ROOT / "docs" / "reference" / "failures.md").read_text(encoding="utf-8")
    shown = page.partition("## Everything under load")[2].partition("\n## ")[0]
    assert dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", shown, re.MULTILINE)[2:]) == rows(kept)
    assert kept.is_good


def chunk(request_id: str, text: str) -> str:
    choice = f'{{"index":0,"text":"{text}"}}'
    return f'data: {{"id":"cmpl-{request_id}","system_fingerprint":"{EMULATED}","choices":[{choice}]}}\n\n'


@pytest.mark.parametrize(
    ("says", "ends", "end"),
    [("the answer", True, "ok"), ("another", True, "wrong"), ("the answer", False, "lost")],
)
async def test_clients_notice_answers_that_are_wrong_or_cut_short(says: str, ends: bool, end: str) -> None:
    questions = Questions(1, BuiltinTokenizer())
    asked = (questions.make(number, TENANTS[0]) for number in range(1000))
    question = next(one for one in asked if one.stream and len(one.prompts) == 1 and not one.leaves)
    [right] = questions.answers(question)

    async def answer(request: web.Request) -> web.Response:
        text = chunk(question.request_id, right if says == "the answer" else says)
        return web.Response(text=text + ("data: [DONE]\n\n" if ends else ""), content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with Clients(url, {TENANTS[0]: "key"}, questions, [EMULATED]) as clients:
            assert await clients.ask(question) == end
            assert [cut.replica for cut in clients.tally.cuts] == ([EMULATED] if end == "lost" else [])
    finally:
        await runner.cleanup()
