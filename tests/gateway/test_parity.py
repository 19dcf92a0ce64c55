"""Replicas that make other token ids, or cache other than predicted, over real sockets: found, reported, distrusted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import pytest
import structlog
from aiohttp import ClientSession, web
from click.testing import CliRunner, Result
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from gateway.conftest import Serve, Served
from gateway.fakes import FakeReplica, die_before, rubbish, running, status
from preble.cli import cli
from preble.config import AuthConfig, GatewayConfig, ParityConfig, ReplicaConfig, TokenizerConfig
from preble.core.types import ReplicaId
from preble.engines import Engine
from preble.engines.starting.launch import Fleet, LaunchOptions
from preble.gateway.server import Gateway, serving
from preble.prompts.tokens.tokenizer import PromptTokenizer
from preble.serving.parity.answers import PROSE
from preble.serving.parity.check import NEVER_SEEN_TOKENS, ParityCheck
from preble.serving.parity.report import Check, ParityOutcome
from preble.serving.parity.watch import ParityWatch
from support.waiting import eventually

ON = ParityConfig(answer_s=20.0, events_s=20.0, retry_s=600.0)
LONG = "the same beginning of every prompt " * 8


class CachingReplica(FakeReplica):
    """A replica that caches prompts of token ids in whole blocks and says so.

    `block`: of its cache. `cached`: what it reports, from a prompt's length and the whole blocks found. `shift`: what
    is added to each token id that it makes for a body. `refuses`: fields of bodies that it does not tokenize.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.block = 16
        self.cached: Callable[[int, int], int | None] = lambda length, found: found
        self.shift: Callable[[dict[str, Any]], int] = lambda body: 0
        self.refuses: tuple[str, ...] = ()
        self.prompts: list[list[int]] = []

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.tokenizes and any(field in body for field in self.refuses):
            return web.json_response({"error": {"message": "not that"}}, status=400)
        if not self.tokenizes or self.tokenize_gated:
            return await super()._tokenize(request)
        text = body["prompt"] if "prompt" in body else "".join(m["content"] for m in body["messages"])
        return web.json_response({"tokens": [byte + self.shift(body) for byte in text.encode()]})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        prompt = (await request.json())["prompt"]
        if isinstance(prompt, list):
            shared = max((agreement(prompt, other) for other in self.prompts), default=0)
            found = min(shared, len(prompt) - 1) // self.block * self.block
            self.cached_tokens = self.cached(len(prompt), found)
            self.prompts.append(prompt)
        return await super()._serve(request)


def agreement(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def caching(count: int = 1) -> AbstractAsyncContextManager[list[CachingReplica]]:
    return running([CachingReplica() for _ in range(count)])


@pytest.fixture
def byte_tokens(tmp_path: Path) -> str:
    """A tokenizer whose tokens are bytes, as the fake replicas' are; a chat is its messages' text."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    names = {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    tokenizer = Tokenizer(BPE(names, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}"})
    )
    return str(tmp_path)


async def checked(gateway: Served) -> None:
    """Wait until every live replica was checked."""
    live = gateway.gateway.serving.replicas
    await eventually(lambda: all(replica.parity is not None for replica in live.values()))


async def reports(gateway: Served, *, anew: bool = False) -> dict[str, dict[str, Any]]:
    """By replica: its report, with the findings by check."""
    ask = gateway.http.post if anew else gateway.http.get
    async with ask("/debug/parity") as answer:
        assert answer.status == 200, await answer.text()
        page = await answer.json()
    return {r["replica"]: {**r, "findings": {f["check"]: f for f in r["findings"]}} for r in page["reports"]}


async def report_of(gateway: Served, replica: FakeReplica) -> dict[str, Any]:
    await checked(gateway)
    return (await reports(gateway))[replica.url]


async def preble(*arguments: str) -> Result:
    """The command, in a thread, so that the gateway in this one can answer it."""
    return await asyncio.to_thread(CliRunner().invoke, cli, arguments)


async def test_a_replica_like_the_gateway_is_verified_when_it_has_joined(serve: Serve, byte_tokens: str) -> None:
    async with caching() as [one], serve([one], parity=ON, tokenizer=byte_tokens) as gateway:
        report = await report_of(gateway, one)
        assert (report["outcome"], report["trusted"]) == ("verified", True)
        assert list(report["findings"]) == ["completion", "special", "chat", "tools", "cached_tokens"]
        metrics = await gateway.metrics()
        assert f'preble_replica_parity{{check="chat",replica="{one.url}"}} 1.0' in metrics
        assert f'preble_replica_trusted{{replica="{one.url}"}} 1.0' in metrics
        async with gateway.http.get("/debug/replicas") as answer:
            [replica] = (await answer.json())["replicas"]
        assert (replica["trusted"], replica["parity"]) == (True, "verified")


async def test_its_cost_is_one_prompt_of_64_tokens_twice_and_counts_as_no_request(
    serve: Serve, byte_tokens: str
) -> None:
    async with caching() as [one], serve([one], parity=ON, tokenizer=byte_tokens) as gateway:
        await checked(gateway)
        assert [len(body["prompt"]) for body in one.requests] == [64, 64]
        assert {body["max_tokens"] for body in one.requests} == {1}
        state = gateway.scheduler.snapshot().replicas[ReplicaId(one.url)]
        assert (state.load_s, state.cached_tokens, state.drift.num_requests) == (0.0, 0, 0)
        assert gateway.scheduler.snapshot().num_index_tokens == 0
        metrics = await gateway.metrics()
        assert "preble_placements_total{" not in metrics and "preble_cached_tokens_total{" not in metrics


class AnsweringReplica(CachingReplica):
    """It reports the ids that it makes of a text, and answers them as the text unless `odd` says what else.

    `odd`: changes an answer, knowing whether the prompt was of ids.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.odd: Callable[[dict[str, Any], bool], None] = lambda answer, is_ids: None

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("return_token_ids"):
            return await super()._serve(request)
        prompt = body["prompt"]
        ids = prompt if isinstance(prompt, list) else list(prompt.encode())
        choice = {"text": "b", "finish_reason": "length", "prompt_token_ids": ids}
        answer = {"id": str(len(self.requests)), "choices": [choice], "usage": {"prompt_tokens": len(ids)}}
        self.requests.append(body)
        self.odd(answer, isinstance(prompt, list))
        return web.json_response(answer)


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> AbstractAsyncContextManager[list[AnsweringReplica]]:
    monkeypatch.setattr("preble.engines.openai.OpenAIEngine.takes_ids", True)
    return running([AnsweringReplica()])


@pytest.mark.parametrize(
    ("odd", "outcome", "detail"),
    [
        (lambda answer, is_ids: None, "verified", ""),
        (
            lambda answer, is_ids: answer["choices"][0].pop("prompt_token_ids"),
            "unchecked",
            "the replica does not report the ids that it makes of a text",
        ),
        (
            lambda answer, is_ids: answer["choices"][0]["prompt_token_ids"].append(1),
            "mismatch",
            f"token {len(PROSE)} is missing (there are {len(PROSE)}) in the gateway, 1 in the replica",
        ),
        (
            lambda answer, is_ids: answer["choices"][0].update(text="c" if is_ids else "b"),
            "mismatch",
            f"to a text it answers ['b'] ({len(PROSE)} prompt tokens), to the text's token ids ['c']"
            f" ({len(PROSE)} prompt tokens)",
        ),
        (
            lambda answer, is_ids: answer["usage"].update(prompt_tokens=3) if is_ids else None,
            "mismatch",
            f"to a text it answers ['b'] ({len(PROSE)} prompt tokens), to the text's token ids ['b'] (3 prompt tokens)",
        ),
    ],
)
async def test_a_replica_gets_ids_only_if_it_answers_them_as_the_text(
    serve: Serve,
    byte_tokens: str,
    answering: AbstractAsyncContextManager[list[AnsweringReplica]],
    odd: Callable[[dict[str, Any], bool], None],
    outcome: str,
    detail: str,
) -> None:
    async with answering as [one]:
        one.odd = odd
        async with serve([one], parity=ON, tokenizer=byte_tokens) as gateway:
            report = await report_of(gateway, one)
            found = report["findings"]["ids"]
            assert (found["outcome"], found["detail"], report["trusted"]) == (outcome, detail, True)
            [live] = gateway.gateway.serving.replicas.values()
            assert live.takes_ids is (outcome == "verified")
            one.odd = lambda answer, is_ids: None
            assert (await reports(gateway, anew=True))[one.url]["findings"]["ids"]["outcome"] == "verified"
            assert live.takes_ids


async def test_a_replica_gets_no_ids_if_those_of_pieces_differ_from_those_of_the_whole(
    serve: Serve,
    byte_tokens: str,
    answering: AbstractAsyncContextManager[list[AnsweringReplica]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = PromptTokenizer.piece
    monkeypatch.setattr(PromptTokenizer, "piece", lambda tokenizer, piece: whole(tokenizer, piece) + bytes(4))
    async with answering as [one], serve([one], parity=ON, tokenizer=byte_tokens) as gateway:
        found = (await report_of(gateway, one))["findings"]["ids"]
        assert found["outcome"] == "mismatch", found
        assert not any(live.takes_ids for live in gateway.gateway.serving.replicas.values())


async def test_answers_are_not_compared_where_ids_are_not_sent(
    serve: Serve, byte_tokens: str, answering: AbstractAsyncContextManager[list[AnsweringReplica]]
) -> None:
    off = TokenizerConfig(send_ids=False)
    async with answering as [one], serve([one], parity=ON, tokenizer=byte_tokens, tokenizing=off) as gateway:
        assert "ids" not in (await report_of(gateway, one))["findings"]
        assert not any(live.takes_ids for live in gateway.gateway.serving.replicas.values())


CLIENTS_MAX_TOKENS = 77


class RefusingReplica(AnsweringReplica):
    """It notes the prompts of clients in `sent`; `refuses_now` says whether it answers 503."""

    sent: ClassVar[list[object]] = []
    refuses_now: ClassVar[Callable[[], bool]] = staticmethod(lambda: False)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("max_tokens") != CLIENTS_MAX_TOKENS:
            return await super()._serve(request)
        self.sent.append(body["prompt"])
        return await status(503)(self, request, body) if type(self).refuses_now() else await super()._serve(request)


async def test_a_replica_that_nobody_has_checked_gets_the_text_of_a_request_that_moves_there(
    serve: Serve, byte_tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preble.engines.openai.OpenAIEngine.takes_ids", True)
    text = "x" * 2000
    async with (
        running([RefusingReplica(), RefusingReplica()]) as both,
        serve(both, parity=ON, tokenizer=byte_tokens) as gateway,
    ):
        lives = gateway.gateway.serving.replicas
        await eventually(lambda: all(live.takes_ids for live in lives.values()), "both are checked")

        def first_refuses() -> bool:
            for live in lives.values():
                lives.set_takes_ids(live, False)
            return len(RefusingReplica.sent) == 1

        monkeypatch.setattr(RefusingReplica, "refuses_now", staticmethod(first_refuses))
        monkeypatch.setattr(RefusingReplica, "sent", [])
        body = {"model": "tiny", "prompt": text, "max_tokens": CLIENTS_MAX_TOKENS}
        async with gateway.http.post("/v1/completions", json=body) as answer:
            assert answer.status == 200
        assert RefusingReplica.sent == [list(text.encode()), text]


async def test_no_two_checks_send_the_same_prompt(serve: Serve) -> None:
    async with caching() as [one], serve([one], parity=ON) as gateway:
        await checked(gateway)
        await reports(gateway, anew=True)
        first, _, second, _ = one.prompts
        assert agreement(first, second) < NEVER_SEEN_TOKENS


def other_ids(body: dict[str, Any]) -> int:
    return 1


def other_template(body: dict[str, Any]) -> int:
    return 1 if "messages" in body else 0


def other_tools(body: dict[str, Any]) -> int:
    return 1 if "tools" in body else 0


@pytest.mark.parametrize(
    ("shift", "differing", "trusted"),
    [
        (other_ids, {"completion", "special", "chat", "tools"}, False),
        (other_template, {"chat", "tools"}, False),
        (other_tools, {"tools"}, True),
    ],
)
async def test_other_token_ids_are_found_with_the_first_that_differs(
    serve: Serve, byte_tokens: str, shift: Callable[[dict[str, Any]], int], differing: set[str], trusted: bool
) -> None:
    async with caching() as [one]:
        one.shift = shift
        with structlog.testing.capture_logs() as logs:
            async with serve([one], parity=ON, tokenizer=byte_tokens) as gateway:
                report = await report_of(gateway, one)
                metrics = await gateway.metrics()
                async with gateway.http.get("/ready") as answer:
                    assert (await answer.json())["untrusted"] == (0 if trusted else 1)
        found = {check: f for check, f in report["findings"].items() if f["outcome"] == "mismatch"}
        assert (report["outcome"], report["trusted"], set(found)) == ("mismatch", trusted, differing)
        tools = found["tools"]
        assert (tools["position"], tools["ours"], tools["theirs"]) == (0, ord("W"), ord("W") + 1)
        assert f'preble_replica_parity{{check="tools",replica="{one.url}"}} 0.0' in metrics
        warned = [log for log in logs if log["event"] == "parity_mismatch"]
        assert {log["check"] for log in warned} == differing
        assert all(log["log_level"] == "warning" and "docs/howto/parity.md" in log["hint"] for log in warned)


@pytest.mark.parametrize(
    ("told", "trusted"),
    [
        (lambda length, found: 0, False),
        (lambda length, found: found - 32 if found else 0, False),
        (lambda length, found: found - 16 if found else 0, True),
        (lambda length, found: length - 1 if found else 0, True),
        (lambda length, found: 48, False),
    ],
    ids=[
        "nothing is cached",
        "two blocks less",
        "one block less",
        "more than whole blocks",
        "cached what it never had",
    ],
)
async def test_another_count_of_cached_tokens_is_found_and_costs_trust_where_too_much_was_predicted(
    serve: Serve, byte_tokens: str, told: Callable[[int, int], int], trusted: bool
) -> None:
    async with caching() as [one]:
        one.cached = told
        async with serve([one], parity=ON, tokenizer=byte_tokens) as gateway:
            report = await report_of(gateway, one)
            assert (report["outcome"], report["trusted"]) == ("mismatch", trusted)
            assert report["findings"]["cached_tokens"]["outcome"] == "mismatch"
            assert report["findings"]["chat"]["outcome"] == "verified"


async def test_a_replica_with_tiers_may_serve_the_whole_prompt_from_them(
    serve: Serve, byte_tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "kv_peer", "127.0.0.1:5710")
    async with caching() as [one]:
        one.cached = lambda length, found: length if found else 0
        async with serve([one], parity=ON, tokenizer=byte_tokens) as gateway:
            assert (await report_of(gateway, one))["findings"]["cached_tokens"]["outcome"] == "verified"


@pytest.mark.parametrize("block", [1, 8, 32, 64, 128])
async def test_blocks_of_another_size_are_found(serve: Serve, byte_tokens: str, block: int) -> None:
    """Nothing reports the block size of a plain OpenAI server: 16 is assumed."""
    async with caching() as [one]:
        one.block = block
        async with serve([one], parity=ON, tokenizer=byte_tokens) as gateway:
            finding = (await report_of(gateway, one))["findings"]["cached_tokens"]
            assert finding["outcome"] == "mismatch"
            assert "48 were predicted with blocks of 16" in finding["detail"]


async def test_one_wrong_count_is_not_believed(serve: Serve, byte_tokens: str) -> None:
    """A busy replica can evict a prompt as soon as it is computed."""
    async with caching() as [one]:
        counts = iter([0, 0])
        one.cached = lambda length, found: next(counts, found)
        async with serve([one], parity=ON, tokenizer=byte_tokens) as gateway:
            assert (await report_of(gateway, one))["outcome"] == "verified"
            assert len(one.prompts) == 4


async def test_what_cannot_be_compared_is_said_and_costs_no_trust(serve: Serve, byte_tokens: str) -> None:
    async with caching() as [one]:
        one.tokenizes = False
        with structlog.testing.capture_logs() as logs:
            async with serve([one], parity=ON, tokenizer=byte_tokens) as gateway:
                report = await report_of(gateway, one)
                metrics = await gateway.metrics()
        assert (report["outcome"], report["trusted"]) == ("unchecked", True)
        assert {finding["outcome"] for finding in report["findings"].values()} == {"unchecked"}
        assert "has no /tokenize" in report["findings"]["chat"]["detail"]
        assert f'preble_replica_parity{{check="chat",replica="{one.url}"}} -1.0' in metrics
        [warned] = [log for log in logs if log["event"] == "parity_unchecked"]
        assert "has no /tokenize" in warned["cached_tokens"]


async def test_a_replica_that_reports_no_cached_tokens_is_said_how_to(serve: Serve, byte_tokens: str) -> None:
    async with caching() as [one]:
        one.cached = lambda length, found: None
        async with serve([one], parity=ON, tokenizer=byte_tokens) as gateway:
            finding = (await report_of(gateway, one))["findings"]["cached_tokens"]
            assert (finding["outcome"], "--enable-prompt-tokens-details" in finding["detail"]) == ("unchecked", True)


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        (rubbish(b"<html>", "text/html"), "not a completion"),
        (rubbish(b'{"choices": [], "usage": "much"}', "application/json"), "not a completion"),
        (rubbish(b'{"choices": []}', "application/json"), "does not report cached tokens"),
        (rubbish(b" " * 2**21, "application/json"), "more than 1048576 bytes"),
        (status(400), "status 400"),
        (die_before, "broke the connection"),
    ],
)
async def test_a_probe_that_comes_to_nothing_is_no_verdict(
    serve: Serve, byte_tokens: str, behaviour: Any, said: str
) -> None:
    async with caching() as [one]:
        one.script.extend([behaviour, behaviour])
        async with serve([one], parity=ON, tokenizer=byte_tokens) as gateway:
            report = await report_of(gateway, one)
            assert report["trusted"]
            finding = report["findings"]["cached_tokens"]
            assert finding["outcome"] == "unchecked"
            assert said in finding["detail"]


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["a"], None, {}])
async def test_rubbish_in_place_of_token_ids_is_no_verdict(serve: Serve, byte_tokens: str, tokens: Any) -> None:
    class Rubbish(CachingReplica):
        async def _tokenize(self, request: web.Request) -> web.Response:
            return web.json_response({"tokens": tokens})

    one = Rubbish()
    await one.start()
    try:
        async with serve([one], parity=ON, tokenizer=byte_tokens) as gateway:
            report = await report_of(gateway, one)
            assert {finding["outcome"] for finding in report["findings"].values()} == {"unchecked"}
            assert "/tokenize" in report["findings"]["completion"]["detail"]
    finally:
        await one.stop()


async def test_a_replica_that_does_not_answer_is_unchecked_in_time(serve: Serve, byte_tokens: str) -> None:
    async with caching() as [one]:
        one.tokenize_gated = True
        async with serve([one], parity=ParityConfig(answer_s=0.05), tokenizer=byte_tokens) as gateway:
            report = await report_of(gateway, one)
            details = {finding["detail"] for finding in report["findings"].values()}
            assert details == {"no answer within 0.05 s (`parity.answer_s`)"}
            assert (await gateway.complete())[0] == 200, "meanwhile it serves"


async def test_what_both_refuse_agrees_and_what_only_one_refuses_is_reported(serve: Serve, byte_tokens: str) -> None:
    (Path(byte_tokens) / "tokenizer_config.json").unlink()
    async with caching(2) as [strict, lax]:
        strict.refuses = ("messages",)
        async with serve([strict, lax], parity=ON, tokenizer=byte_tokens) as gateway:
            of_strict, of_lax = await report_of(gateway, strict), await report_of(gateway, lax)
            assert (of_strict["outcome"], of_strict["findings"]["chat"]["detail"]) == ("verified", "both refuse it")
            chat = of_lax["findings"]["chat"]
            assert (chat["outcome"], of_lax["trusted"]) == ("mismatch", True), "nothing like it is ever placed"
            assert "no chat template" in chat["detail"]


async def test_what_only_the_replica_refuses_cannot_be_compared(serve: Serve, byte_tokens: str) -> None:
    async with caching() as [one]:
        one.refuses = ("tools",)
        async with serve([one], parity=ON, tokenizer=byte_tokens) as gateway:
            tools = (await report_of(gateway, one))["findings"]["tools"]
            assert (tools["outcome"], "not that" in tools["detail"]) == ("unchecked", True)


async def test_without_a_tokenizer_the_replicas_are_compared_with_the_one_that_was_there_first(serve: Serve) -> None:
    async with caching(2) as [first, second]:
        second.shift = other_template
        await second.stop()
        async with serve([first, second], live=1, parity=ON) as gateway:
            assert (await report_of(gateway, first))["outcome"] == "verified", "its own ids are used"
            await second.start()
            await eventually(lambda: gateway.num_live == 2)
            report = await report_of(gateway, second)
            assert (report["outcome"], report["trusted"]) == ("mismatch", False)
            assert report["findings"]["completion"]["outcome"] == "verified"
            assert (await reports(gateway, anew=True))[first.url]["outcome"] == "verified"


async def test_matches_on_a_replica_of_other_ids_do_not_count_until_it_is_verified(
    serve: Serve, byte_tokens: str
) -> None:
    async with caching() as [one]:
        one.shift = other_ids
        async with serve([one], parity=ON, policy="e2", tokenizer=byte_tokens) as gateway:
            await checked(gateway)
            await gateway.complete(prompt=LONG)
            _, _, headers = await gateway.complete(prompt=LONG)
            assert headers["x-preble-matched-tokens"] == "0"
            result = await preble("explain", headers["x-request-id"], "--url", gateway.gateway.url)
            assert f"did not count: {one.url}." in " ".join(result.stdout.split())
            one.shift = lambda body: 0
            assert (await reports(gateway, anew=True))[one.url]["trusted"]
            _, _, headers = await gateway.complete(prompt=LONG)
            assert int(headers["x-preble-matched-tokens"]) > 200, "what was believed meanwhile counts again"


async def test_it_can_be_reported_only(serve: Serve, byte_tokens: str) -> None:
    async with caching() as [one]:
        one.shift = other_ids
        only_told = ParityConfig(distrust=False)
        async with serve([one], parity=only_told, tokenizer=byte_tokens) as gateway:
            report = await report_of(gateway, one)
            assert (report["outcome"], report["trusted"]) == ("mismatch", True)


async def test_what_cannot_be_compared_gives_no_trust_back(serve: Serve, byte_tokens: str) -> None:
    async with caching() as [one]:
        one.shift = other_ids
        async with serve([one], parity=ON, tokenizer=byte_tokens) as gateway:
            assert not (await report_of(gateway, one))["trusted"]
            one.tokenizes = False
            [report] = (await reports(gateway, anew=True)).values()
            assert (report["outcome"], report["trusted"]) == ("unchecked", False)


async def test_a_replica_that_was_not_verified_is_checked_again_and_not_warned_of_again(
    serve: Serve, byte_tokens: str
) -> None:
    async with caching() as [one]:
        one.shift = other_ids
        with structlog.testing.capture_logs() as logs:
            async with serve([one], parity=ParityConfig(retry_s=0.01), tokenizer=byte_tokens) as gateway:
                await eventually(lambda: len(one.prompts) >= 6)
                assert sum(log["event"] == "parity_mismatch" for log in logs) == 4, "one a check, the first time"
                one.shift = lambda body: 0
                await eventually(lambda: any(log["event"] == "parity_verified" for log in logs))
                [replica] = gateway.gateway.serving.replicas.values()
                assert replica.trusted


async def test_a_replica_that_comes_back_is_checked_again(serve: Serve, byte_tokens: str) -> None:
    async with caching() as [one], serve([one], parity=ON, tokenizer=byte_tokens) as gateway:
        assert (await report_of(gateway, one))["outcome"] == "verified"
        await one.stop()
        await eventually(lambda: gateway.num_live == 0)
        assert "preble_replica_parity{" not in await gateway.metrics()
        one.shift = other_ids
        await one.start()
        await eventually(lambda: gateway.num_live == 1)
        assert (await report_of(gateway, one))["outcome"] == "mismatch"


async def test_a_check_under_way_does_not_keep_a_dead_replica_in_the_rotation(serve: Serve, byte_tokens: str) -> None:
    async with caching() as [one]:
        one.tokenize_gated = True
        async with serve([one], parity=ON, tokenizer=byte_tokens) as gateway:
            await eventually(lambda: one.tokenizing == 1)
            one.healthy = False
            await eventually(lambda: gateway.num_live == 0)


async def test_a_replica_too_small_for_the_prompt_is_said_to_be(serve: Serve, byte_tokens: str) -> None:
    one = CachingReplica(max_model_len=64)
    await one.start()
    try:
        async with serve([one], parity=ON, tokenizer=byte_tokens) as gateway:
            finding = (await report_of(gateway, one))["findings"]["cached_tokens"]
            assert (finding["outcome"], finding["detail"]) == ("unchecked", "the replica has no room for 64 tokens")
            assert one.prompts == []
    finally:
        await one.stop()


async def test_a_replica_that_leaves_during_a_check_leaves_nothing_behind(serve: Serve, byte_tokens: str) -> None:
    async with caching() as [one], serve([one], tokenizer=byte_tokens) as gateway:
        one.tokenize_gated = True
        parsed = asyncio.create_task(reports(gateway, anew=True))
        await eventually(lambda: one.tokenizing == 1)
        one.healthy = False
        await eventually(lambda: gateway.num_live == 0)
        one.gate.set()
        assert list(await parsed) == [one.url]
        assert "preble_replica_parity{" not in await gateway.metrics()


async def test_off_it_runs_only_when_asked(serve: Serve, byte_tokens: str) -> None:
    off = ParityConfig(enabled=False)
    async with caching() as [one], serve([one], parity=off, tokenizer=byte_tokens) as gateway:
        assert await reports(gateway) == {}
        [report] = (await reports(gateway, anew=True)).values()
        assert report["outcome"] == "verified"
        assert list(await reports(gateway)) == [one.url]


async def test_a_failure_of_ours_does_not_take_the_replica_down(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: ParityWatch, replica: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ParityWatch, "check", broken)
    with structlog.testing.capture_logs() as logs:
        async with caching() as [one], serve([one], parity=ON) as gateway:
            await eventually(lambda: any(log["event"] == "parity_check_failed" for log in logs))
            assert (await gateway.complete())[0] == 200


async def test_the_page_needs_the_key_and_knows_its_methods(serve: Serve) -> None:
    async with caching() as [one], serve([one], auth=AuthConfig(admin_keys=("k",))) as gateway:
        async with gateway.http.post("/debug/parity") as answer:
            assert answer.status == 401
        headers = {"Authorization": "Bearer k"}
        async with gateway.http.put("/debug/parity", headers=headers) as answer:
            assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD, POST")
        async with gateway.http.post("/debug/replicas", headers=headers) as answer:
            assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


# the command


async def test_the_command_says_that_all_is_well(serve: Serve, byte_tokens: str) -> None:
    async with caching() as [one], serve([one], tokenizer=byte_tokens) as gateway:
        result = await preble("check", "--url", gateway.gateway.url)
        assert result.exit_code == 0, result.output
        assert f"{one.url} (openai): verified; took" in result.stdout
        assert "    cached_tokens verified" in result.stdout


async def test_the_command_fails_on_a_mismatch_and_says_which(serve: Serve, byte_tokens: str) -> None:
    async with caching() as [one], serve([one], tokenizer=byte_tokens) as gateway:
        one.shift = other_template
        result = await preble("check", "--url", gateway.gateway.url)
        assert result.exit_code == 1
        assert "mismatch, so that its matches count as none" in result.stdout
        assert "chat          mismatch  token 0 is 87 in the gateway, 88 in the replica" in result.stdout
        as_json = await preble("check", "--url", gateway.gateway.url, "--json", "-")
        assert (as_json.exit_code, json.loads(as_json.stdout)["reports"][0]["trusted"]) == (1, False)


async def test_the_command_asks_the_gateway_itself_whatever_proxy_is_set(
    serve: Serve, byte_tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    async with caching() as [one], serve([one], tokenizer=byte_tokens) as gateway:
        result = await preble("check", "--url", gateway.gateway.url)
        assert (result.exit_code, result.stderr) == (0, "")


async def test_the_command_says_when_there_is_nothing_to_check(serve: Serve) -> None:
    async with caching() as [one]:
        await one.stop()
        async with serve([one], live=0) as gateway:
            result = await preble("check", "--url", gateway.gateway.url)
            assert (result.exit_code, "no replica is up" in result.stderr) == (1, True)
    result = await preble("check", "--url", gateway.gateway.url)
    assert (result.exit_code, "nothing answers at" in result.stderr) == (2, True)


# replicas that report KV events


@asynccontextmanager
async def before_emulator(tmp_path: Path, **replica: Any) -> AsyncIterator[Gateway]:
    async with Fleet(LaunchOptions(engine="emulator", replicas=1, log_dir=tmp_path)) as fleet:
        config = GatewayConfig(
            replicas=(ReplicaConfig(fleet.urls[0], **replica),),
            port=0,
            parity=ParityConfig(events_s=0.5 if replica else 20.0),
        )
        async with serving(config) as gateway:
            await eventually(lambda: any(live.parity is not None for live in gateway.serving.replicas.values()))
            yield gateway


async def test_an_emulated_replica_is_verified_with_its_events(tmp_path: Path) -> None:
    async with before_emulator(tmp_path) as gateway:
        [replica] = gateway.serving.replicas.values()
        assert replica.parity is not None and replica.parity.outcome is ParityOutcome.VERIFIED
        assert replica.parity.findings[-1].check is Check.EVENTS


async def test_events_count_although_their_blocks_are_evicted_before_anybody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a long replay, where a block's whole life is taken in at once."""
    monkeypatch.setattr(ParityCheck, "_believed", lambda check, prompt: 0)
    async with before_emulator(tmp_path) as gateway:
        [replica] = gateway.serving.replicas.values()
        assert replica.parity is not None and replica.parity.outcome is ParityOutcome.VERIFIED


async def test_events_that_do_not_come_although_they_should_are_found(tmp_path: Path) -> None:
    async with before_emulator(tmp_path, kv_events="tcp://127.0.0.1:9") as gateway:
        [replica] = gateway.serving.replicas.values()
        assert replica.parity is not None
        *others, events = replica.parity.findings
        assert {finding.outcome for finding in others} == {ParityOutcome.VERIFIED}
        assert (events.check, events.outcome) == (Check.EVENTS, ParityOutcome.MISMATCH)
        assert events.detail == "its KV events reported 0 of 48 tokens within 0.5 s"
        assert not replica.trusted


async def test_the_events_of_another_replica_cost_trust_although_they_arrive(tmp_path: Path) -> None:
    """Each replica is configured with the other's event stream, which can be reached and says what is not so."""
    async with Fleet(LaunchOptions(engine="emulator", replicas=2, log_dir=tmp_path)) as fleet:
        async with ClientSession() as session:
            sources = []
            for url in fleet.urls:
                async with session.get(f"{url}/kv_event_sources") as answer:
                    sources.append(next(iter((await answer.json()).values())))
        crossed = zip(fleet.urls, reversed(sources), strict=True)
        config = GatewayConfig(
            replicas=tuple(
                ReplicaConfig(url, kv_events=other["endpoint"], kv_events_replay=other["replay_endpoint"])
                for url, other in crossed
            ),
            port=0,
            parity=ParityConfig(events_s=0.5),
        )
        async with serving(config) as gateway:
            replicas = gateway.serving.replicas
            await eventually(lambda: sum(live.parity is not None for live in replicas.values()) == 2)
            findings = [live.parity.findings[-1] for live in replicas.values() if live.parity is not None]
            assert {(finding.check, finding.outcome) for finding in findings} == {
                (Check.EVENTS, ParityOutcome.MISMATCH)
            }
            assert not any(live.trusted or live.has_lost_events for live in replicas.values())
