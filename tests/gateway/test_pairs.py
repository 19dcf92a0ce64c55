"""A gateway before emulated replicas with fixed roles: pairs of them answer, and what becomes of a pair that fails."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from io import BytesIO
from itertools import zip_longest
from typing import Any

import aiohttp
import pytest

from preble.config import AuthConfig, HealthConfig, ParityConfig, ReplicaConfig, TimeoutsConfig
from preble.core.types import ReplicaId, Role, TransferKind
from preble.emulator import EmulatorConfig, EmulatorServer
from preble.emulator.pairs.roles import RolePages
from preble.emulator.web import EmulatorRequest
from preble.engines.sglang import pairs as sglang_pairs
from preble.gateway.server import Gateway
from preble.prompts.endpoints import COMPLETIONS
from preble.serving.parity.report import ParityOutcome
from support.gateways import QUICK, gateway_before, idle
from support.waiting import eventually

BLOCK = 16
PROMPT = list(range(1, 20 * BLOCK + 6))
ADMIN = AuthConfig(admin_keys=("root",))
WORK = re.compile(r"(vllm:num_requests_(running|waiting)|sglang:num_\w+_queue_reqs)\b")
A6000 = "a6000-mistral-7b"
ROLES = ("prefill", "prefill", "decode", "decode")
HASTY = HealthConfig(check_interval_s=0.05, check_timeout_s=1.0, failures=2, retry_min_s=0.02, retry_max_s=0.05)
"""Its checks time out soon, yet not on a replica that answers, though the machine be busy."""


class Fleet:
    """A gateway before emulated replicas with these roles."""

    def __init__(self, servers: list[EmulatorServer], gateway: Gateway, http: aiohttp.ClientSession) -> None:
        self.servers = servers
        self.gateway = gateway
        self.http = http

    async def post(self, path: str = "/v1/completions", **body: object) -> tuple[int, Any]:
        body = {"prompt": PROMPT, "max_tokens": 4, **body} if path == "/v1/completions" else body
        async with self.http.post(path, json=body) as answer:
            return answer.status, json.loads(await answer.text()) if not body.get("stream") else await answer.text()

    async def ask(self, **body: object) -> Any:
        status, answer = await self.post(**body)
        assert status == 200, answer
        return answer

    def of_role(self, role: str) -> list[EmulatorServer]:
        return [server for server in self.servers if server.config.role == role]

    def decision(self) -> Any:
        return next(iter(self.gateway.serving.recent.latest(1)))

    async def is_idle(self) -> None:
        """Nothing is in flight any more, in the gateway and in the replicas."""
        await idle(self.gateway)
        await eventually(self.replicas_are_idle, "all has ended at the replicas")

    async def replicas_are_idle(self) -> bool:
        return not sum([await self.work_of(server) for server in self.servers])

    async def works(self, role: str) -> bool:
        return bool(sum([await self.work_of(server) for server in self.of_role(role)]))

    async def work_of(self, server: EmulatorServer) -> float:
        """Requests that run or wait there, those that wait for their other leg among them."""
        async with self.http.get(server.url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if WORK.match(line))


@asynccontextmanager
async def fleet(
    *roles: str, speed: float = 50.0, of_each: Sequence[dict[str, Any]] = (), **settings: Any
) -> AsyncIterator[Fleet]:
    """`of_each`: further settings of the replicas, in their order."""
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(
                EmulatorServer(EmulatorConfig(port=0, profile=A6000, speed=speed, role=Role(role), **(more or {})))
            )
            for role, more in zip_longest(roles, of_each)
        ]
        replicas = [ReplicaConfig(server.url) for server in servers]
        given = {"auth": ADMIN, "health": QUICK, **settings}
        gateway = await stack.enter_async_context(gateway_before(replicas, **given))
        headers = {"Authorization": "Bearer root"}
        http = await stack.enter_async_context(aiohttp.ClientSession(gateway.url, headers=headers))
        yield Fleet(servers, gateway, http)


async def test_a_cold_prompt_and_a_cached_one_are_answered_as_one_pair_answers_them() -> None:
    async with fleet(*ROLES) as it:
        first, again = await it.ask(), await it.ask()
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 20 * BLOCK
        decision = it.decision()
        assert decision.transfer.kind is TransferKind.PREFILL
        assert decision.transfer.source in [server.url for server in it.of_role("prefill")]
        assert decision.replica in [server.url for server in it.of_role("decode")]
        assert decision.transferred_s is not None, "the end of the source's leg is told"
        assert it.gateway.serving.telemetry.numbers.sum_by("outcome", "preble_splits_total") == {"ok": [2.0]}
        await it.is_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_each_endpoint_is_answered_by_pairs(stream: bool) -> None:
    chat = {"messages": [{"role": "user", "content": "Where is the fox?"}], "max_tokens": 4, "stream": stream}
    async with fleet(*ROLES) as it:
        for path, body in (("/v1/completions", {"stream": stream}), ("/v1/chat/completions", chat)):
            status, answer = await it.post(path, **body)
            assert status == 200, answer
            if stream:
                assert answer.rstrip().endswith("[DONE]") and "error" not in answer
        await it.is_idle()


async def test_operators_see_the_role_and_the_group_of_each_replica_that_is_up() -> None:
    async with fleet("prefill", "decode") as it:
        async with it.http.get("/replicas") as answer:
            listed = {row["url"]: row for row in (await answer.json())["replicas"]}
        async with it.http.get("/ui/picture") as answer:
            drawn = {row["name"]: row for row in (await answer.json())["replicas"]}
        for role in ("prefill", "decode"):
            [server] = it.of_role(role)
            spec = it.gateway.serving.replicas[ReplicaId(server.url)].info.spec
            assert spec.transfer_group
            for row in (listed[server.url], drawn[server.url]):
                assert (row["role"], row["transfer_group"]) == (role, spec.transfer_group)


async def test_requests_at_once_share_no_room() -> None:
    async with fleet(*ROLES) as it:
        prompts = [[i, *PROMPT] for i in range(2, 22)]
        alone = [(await it.ask(prompt=prompt))["choices"][0]["text"] for prompt in prompts]
        together = await asyncio.gather(*(it.ask(prompt=prompt) for prompt in prompts))
        assert [answer["choices"][0]["text"] for answer in together] == alone
        await it.is_idle()


async def test_several_answers_are_refused_since_they_would_end_the_engine() -> None:
    async with fleet(*ROLES) as it:
        status, answer = await it.post(n=2)
        assert status == 400 and answer["error"]["param"] == "n"
        await it.ask()
        await it.is_idle()


async def test_what_no_pair_can_carry_goes_to_a_replica_without_a_role_though_a_pair_is_cheaper() -> None:
    async with fleet("prefill", "decode", "mixed") as it:
        [mixed] = it.of_role("mixed")
        busy = [asyncio.create_task(it.post(n=2, max_tokens=100_000)) for _ in range(4)]
        await eventually(lambda: it.gateway.serving.num_in_flight == 4)
        await it.ask()
        assert it.decision().transfer is not None, "a pair is cheaper"
        status, answer = await it.post(n=2)
        assert status == 200 and len(answer["choices"]) == 2 and it.decision().replica == mixed.url
        form = aiohttp.FormData({"file": BytesIO(b"a sound")})
        async with it.http.post("/v1/audio/transcriptions", data=form):
            assert it.decision().replica == mixed.url
        parsed = await it.gateway.serving.parse(COMPLETIONS, {}, json.dumps({"prompt": PROMPT}).encode(), "elsewhere")
        async with it.gateway.serving.admitted(parsed) as parsed:
            [placed] = await it.gateway.serving.place_together(parsed)
            assert placed.placement.replica_id == mixed.url
            placed.cancelled()
        for one in busy:
            one.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        await it.is_idle()


async def test_an_upload_is_refused_where_only_pairs_answer() -> None:
    form = aiohttp.FormData({"file": BytesIO(b"a sound")})
    async with fleet("prefill", "decode") as it, it.http.post("/v1/audio/transcriptions", data=form) as answer:
        assert answer.status == 503 and "only decodes" in await answer.text()


async def test_what_needs_no_prompt_is_asked_of_the_one_that_decodes_alone() -> None:
    async with fleet("prefill", "decode") as it:
        status, answer = await it.post("/tokenize", prompt="Where is the fox?")
        assert status == 200 and answer["count"] > 0
        assert it.decision().transfer_failed, "nothing is computed for it"


async def test_a_stored_response_that_no_pair_can_go_on_with_is_refused_with_what_to_do() -> None:
    async with fleet("prefill", "decode") as it:
        status, answer = await it.post("/v1/responses", input="Where is the fox?", max_output_tokens=4)
        assert status == 200
        status, answer = await it.post("/v1/responses", input="And the dog?", previous_response_id=answer["id"])
        assert status == 400 and answer["error"]["param"] == "previous_response_id"
        assert "send the whole conversation" in answer["error"]["message"]


async def test_a_pair_of_ranks_meets_in_a_room_of_the_sources_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet("prefill", "decode", of_each=[{"data_parallel_size": 2, "events_port": 0}] * 2, joined=4) as it:
        [source], [target] = it.of_role("prefill"), it.of_role("decode")
        assert len(it.gateway.serving.replicas) == 4
        for i in range(6):
            before = [engine.scheduler.stats.prefix_queries for engine in source.engines]
            headers = {"x-data-parallel-rank": str(i % 2)}
            async with it.http.post("/v1/completions", json={"prompt": [i, *PROMPT]}, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
            after = [engine.scheduler.stats.prefix_queries for engine in source.engines]
            [rank] = [rank for rank in range(2) if after[rank] > before[rank]]
            decision = it.decision()
            assert decision.transfer.source == f"{source.url}#{rank}"
            assert decision.replica == f"{target.url}#{i % 2}", "a client chooses the rank that answers"


async def test_a_client_that_names_a_room_itself_is_refused() -> None:
    async with fleet("prefill", "decode") as it:
        for field in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
            status, answer = await it.post(**{field: 1})
            assert status == 400 and field in str(answer)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_request_whose_pair_loses_one_before_the_first_token_is_answered_by_another_pair(role: str) -> None:
    async with fleet(*ROLES) as it:
        right = (await it.ask())["choices"][0]["text"]
        victim = it.of_role(role)[0]
        await stop(victim)
        answers = await asyncio.gather(*(it.ask() for _ in range(4)))
        assert {answer["choices"][0]["text"] for answer in answers} == {right}
        await idle(it.gateway)
        await eventually(lambda: len(it.gateway.serving.replicas) == 3, "it has left")


async def test_requests_whose_source_falls_silent_are_begun_anew_as_soon_as_it_leaves_the_rotation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent: list[EmulatorConfig] = []

    def hanging(name: str) -> None:
        answer = getattr(RolePages, name)

        async def hang(pages: RolePages, exchange: EmulatorRequest) -> None:
            if any(pages._config is one for one in silent):
                with exchange.unless_gone():
                    await asyncio.Event().wait()
            await answer(pages, exchange)

        monkeypatch.setattr(RolePages, name, hang)

    hanging("_loads")  # by which a replica is checked
    hanging("_rooms")
    async with fleet(*ROLES, health=HASTY) as it:
        silent.append(it.of_role("prefill")[0].config)
        answers = await asyncio.gather(*(it.ask(prompt=[i, *PROMPT]) for i in range(8)))
        assert len(answers) == 8
        await eventually(lambda: len(it.gateway.serving.replicas) == 3, "the silent one has left")
        assert any(decision.outcome == "engine_gone" for decision in it.gateway.serving.recent.latest(20))
        await it.is_idle()


async def test_a_source_that_has_lost_its_role_costs_a_request_nothing() -> None:
    async with fleet("prefill", "prefill", "decode") as it:
        source = it.gateway.serving.replicas[it.of_role("prefill")[0].url].engine  # type: ignore[index]
        source.kv_peer = None
        answers = await asyncio.gather(*(it.ask(prompt=[i, *PROMPT]) for i in range(8)))
        assert len(answers) == 8


@pytest.mark.parametrize("stream", [False, True])
async def test_one_whose_mooncake_sessions_are_dead_costs_no_client_an_answer(stream: bool) -> None:
    each: list[dict[str, Any]] = [{"mooncake": True} for _ in ROLES]
    each[-1]["failures"] = 1.0
    async with fleet(*ROLES, of_each=each) as it:
        answers = await asyncio.gather(*(it.post(prompt=[*PROMPT, i], stream=stream) for i in range(12)))
        assert {status for status, _ in answers} == {200}
        assert not any("error" in answer for _, answer in answers)
        failing = it.of_role("decode")[1]
        assert failing.engine.scheduler.stats.generated_tokens == 0
        async with it.http.get(failing.url + "/metrics") as page:
            assert re.search(r"num_transfer_failed_reqs_total\{.*\} [1-9]", await page.text()), "it was asked"
        await it.is_idle()


async def test_replicas_that_send_kv_in_different_ways_make_no_pair() -> None:
    it_has = [{"mooncake": True}, {}]
    async with fleet("prefill", "decode", of_each=it_has, timeouts=TimeoutsConfig(no_replica_wait_s=0.0)) as it:
        status, answer = await it.post()
        assert status == 503, answer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_leaves_nothing_in_flight(stream: bool) -> None:
    async with fleet(*ROLES) as it:
        asking = asyncio.create_task(it.post(max_tokens=100_000, stream=stream))
        await eventually(lambda: it.gateway.serving.num_in_flight == 1)
        await eventually(lambda: it.works("decode"), "the answer decodes")
        assert sorted(it.gateway.serving._placements.running().values()) == [1, 1], "neither may be removed"
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await it.is_idle()


async def test_a_pair_that_hangs_is_begun_anew_and_then_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_pairs, "PREFILL_S", 0.3)  # ships 120 s
    async with fleet("prefill", "decode", speed=1.0) as it:  # the one that decodes looks for the other for 14 s
        source = it.gateway.serving.replicas[it.of_role("prefill")[0].url].engine  # type: ignore[index]
        source.kv_peer = "127.0.0.1:9"  # nobody listens there: no decode ever asks for its room
        status, answer = await it.post()
        assert status >= 500 and "has not computed the prompt" in str(answer)
        await it.is_idle()


@pytest.mark.parametrize(("role", "said"), [("prefill", "none that decodes"), ("decode", "none that computes")])
async def test_one_role_alone_is_an_error_at_once_that_says_which_is_missing(role: str, said: str) -> None:
    async with fleet(role, timeouts=TimeoutsConfig(no_replica_wait_s=0.0)) as it:
        status, answer = await it.post()
        assert status == 503 and said in str(answer)
        async with it.http.get("/ready") as ready:
            assert ready.status == 503 and said in await ready.text()


async def test_the_check_asks_the_pair_and_trusts_it() -> None:
    async with fleet("prefill", "decode", parity=ParityConfig(enabled=False)) as it:
        reports = await it.gateway.serving.check_parity()
        found = {str(finding.check): finding for report in reports for finding in report.findings}
        assert found["cached_tokens"].outcome is ParityOutcome.VERIFIED, found["cached_tokens"].detail
        assert all(report.trusted for report in reports)


async def stop(server: EmulatorServer) -> None:
    """End a replica as if its process were killed."""
    await server.__aexit__(None, None, None)
