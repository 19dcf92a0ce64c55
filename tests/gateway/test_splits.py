"""Splits between two emulated vLLM with NIXL, carried out by a gateway, and what happens when they fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from preble.config import ParityConfig, ReplicaConfig
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import KV_LEASE_S, Placement, ReplicaId, Role
from preble.emulator import EmulatorConfig, EmulatorServer
from preble.emulator.kv import sources
from preble.emulator.kv.kept import KeptKv, KeptPrompts
from preble.engines.vllm.answers import TierConfig, TransferConfig
from preble.gateway.server import Gateway
from preble.serving.parity.report import Check, ParityOutcome
from support.gateways import gateway_before, idle
from support.linked import linked_profile
from support.splitting import always_splitting
from support.waiting import eventually

BLOCK = 16
WHOLE = 20 * BLOCK
PROMPT = list(range(1, WHOLE + 6))
CHAT = {"messages": [{"role": "user", "content": "word " * 400}]}


class Split:
    """A gateway before two emulated replicas, of which the first computes every prompt for the second."""

    def __init__(self, servers: list[EmulatorServer], gateway: Gateway) -> None:
        self.source, self.target = servers
        self.gateway = gateway

    async def ask(self, path: str = "/v1/completions", url: str | None = None, **more: Any) -> Any:
        body = {"max_tokens": 4, **({"prompt": PROMPT} if path == "/v1/completions" else CHAT), **more}
        async with aiohttp.ClientSession(url or self.gateway.url) as http, http.post(path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            if body.get("stream"):
                events = [line for line in (await answer.text()).split("\n\n") if line.startswith("data: {")]
                return "".join(c["text"] for e in events for c in json.loads(e[6:])["choices"])
            return await answer.json()

    def counted(self, metric: str) -> dict[str, float]:
        """What the gateway has counted of a metric, by outcome: "" for one without outcomes."""
        numbers = self.gateway.serving.telemetry.numbers
        by = "outcome" if metric == "splits" else ""
        return {outcome: cell[0] for outcome, cell in numbers.sum_by(by, f"preble_{metric}_total").items()}

    @property
    def computed(self) -> tuple[int, int]:
        """Prompt tokens that each has computed."""
        stats = [server.engine.scheduler.stats for server in (self.source, self.target)]
        first, second = [one.prefix_queries - one.prefix_hits for one in stats]
        return first, second


@asynccontextmanager
async def splitting(
    folder: Path, *, lease_s: float = 30.0, parity: bool = False, given: tuple[dict[str, Any], ...] = ({}, {})
) -> AsyncIterator[Split]:
    """`given`: what the configuration says of both; with a role it splits all that it can."""
    profile = linked_profile(folder, s_per_token=1e-5, bytes_per_s=1e9, latency_s=1e-3)
    config = EmulatorConfig(profile=str(profile), model="m", events_port=0, nixl=True, lease_s=lease_s)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(EmulatorServer(config)) for _ in range(2)]
        replicas = [ReplicaConfig(server.url, **more) for server, more in zip(servers, given, strict=True)]
        scheduler = None if "role" in given[0] else always_splitting(profile, servers[1].url)
        gateway = await stack.enter_async_context(
            gateway_before(replicas, scheduler, parity=ParityConfig(enabled=parity))
        )
        yield Split(servers, gateway)
        await idle(gateway)


async def test_one_computes_and_the_other_decodes(tmp_path: Path) -> None:
    async with splitting(tmp_path) as split:
        answer = await split.ask()
        assert split.computed == (WHOLE + 5, 5), "the emulated target computes what is beyond the last whole block"
        plain = await split.ask(url=split.source.url)
        assert answer["choices"] == plain["choices"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "nothing was cached before"
        newest = next(iter(split.gateway.serving.recent.latest(1)))
        assert newest.transfer is not None and newest.transfer.source == split.source.url
        assert not newest.transfer_failed
        assert split.counted("splits") == {"ok": 1.0}, "and the one that was asked alone is none"
        assert split.counted("split_tokens") == {"": float(WHOLE)}


@pytest.mark.parametrize("more", [{"stream": True}, {"seed": 3, "temperature": 1.0}, {"logprobs": 1}, {"n": 1}])
async def test_a_split_answer_is_that_of_one_replica(tmp_path: Path, more: dict[str, Any]) -> None:
    async with splitting(tmp_path) as split:
        answer = await split.ask(**more)
        assert split.computed[0] == WHOLE + 5
        plain = await split.ask(url=split.source.url, **more)
        assert answer == plain if isinstance(answer, str) else answer["choices"] == plain["choices"]


@pytest.mark.parametrize("cap", ["max_tokens", "max_completion_tokens"])
async def test_a_chat_is_split_too(tmp_path: Path, cap: str) -> None:
    async with splitting(tmp_path) as split:
        answer = await split.ask("/v1/chat/completions", **{cap: 3})
        assert split.computed[0] > split.computed[1] > 0
        plain = await split.ask("/v1/chat/completions", split.source.url, **{cap: 3})
        assert answer["choices"] == plain["choices"]


@pytest.mark.parametrize("more", [{"n": 2}, {"best_of": 2}, {"prompt_logprobs": 1}])
async def test_what_could_go_wrong_is_not_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    place, transfers = GlobalScheduler.place, []

    def spy(*args: Any) -> Placement:
        placement = place(*args)
        transfers.append(placement.transfer)
        return placement

    monkeypatch.setattr(GlobalScheduler, "place", spy)
    async with splitting(tmp_path) as split:
        await split.ask(**more)
        assert split.computed[0] == 0
        assert transfers == [None], "and it is placed as one that is not"


PREFILL: dict[str, Any] = {"role": Role.PREFILL}
DECODE: dict[str, Any] = {"role": Role.DECODE}


async def test_a_role_that_the_configuration_gives_a_vllm_is_fixed(tmp_path: Path) -> None:
    async with splitting(tmp_path, given=(PREFILL, DECODE)) as split:
        answer = await split.ask()
        assert split.computed == (WHOLE + 5, 5), "without a link in the gateway's profile"
        assert answer["choices"] == (await split.ask(url=split.source.url))["choices"]
        before = split.computed
        await split.ask(prompt=PROMPT[1:], n=2)
        assert split.computed[0] == before[0], "what cannot be split is computed where it is decoded"


async def test_a_stored_response_goes_on_where_it_is_though_another_one_computes_prompts(tmp_path: Path) -> None:
    async with (
        splitting(tmp_path, given=(PREFILL, DECODE)) as split,
        aiohttp.ClientSession(split.gateway.url) as http,
    ):
        earlier = None
        for said in ("Where is the fox?", "And the dog?"):
            body = {"input": said, "max_output_tokens": 4, "previous_response_id": earlier}
            async with http.post("/v1/responses", json=body) as answer:
                assert answer.status == 200, await answer.text()
                earlier = (await answer.json())["id"]
                assert answer.headers["x-preble-replica"] == split.target.url


async def test_replicas_of_different_transfer_groups_make_no_pair(tmp_path: Path) -> None:
    async with splitting(tmp_path, given=({"transfer_group": "a", **PREFILL}, {"transfer_group": "b", **DECODE})) as it:
        assert it.gateway.serving.replicas.lacks is None
        await it.ask()
        assert it.computed[0] == 0
        assert it.computed[1] >= WHOLE


async def test_where_none_has_the_role_to_prefill_those_that_decode_compute_prompts(tmp_path: Path) -> None:
    async with splitting(tmp_path, given=(DECODE, DECODE)) as it:
        for path in ("/v1/completions", "/v1/chat/completions"):
            await it.ask(path)
        assert sum(it.computed) > WHOLE
        async with aiohttp.ClientSession(it.gateway.url) as http, http.get("/ready") as ready:
            assert ready.status == 200


async def test_a_fleet_with_given_roles_is_checked_as_pairs(tmp_path: Path) -> None:
    async with splitting(tmp_path, given=(PREFILL, DECODE)) as split:
        reports = await split.gateway.serving.check_parity()
        assert [report.outcome for report in reports] == [ParityOutcome.VERIFIED] * 2, reports


async def test_a_source_that_is_late_costs_the_client_nothing_and_rests(tmp_path: Path) -> None:
    async with splitting(tmp_path, lease_s=0.0001) as split:
        answer = await split.ask()
        assert split.computed[1] == WHOLE + 5, "the target has computed it all"
        assert next(iter(split.gateway.serving.recent.latest(1))).transfer_failed
        assert split.counted("splits") == {"failed": 1.0} and not split.counted("split_tokens").get("")
        record = split.gateway.serving._placements.ejection._replicas[ReplicaId(split.source.url)]
        assert record.num_failed == 0, "a queue is no failure"
        assert answer["choices"] == (await split.ask(url=split.target.url))["choices"]
        before = split.computed[0]
        await split.ask(prompt=PROMPT[1:])
        assert split.computed[0] == before, "nobody asks the source again so soon"
        newest = next(iter(split.gateway.serving.recent.latest(1)))
        assert newest.transfer_failed


async def test_a_source_that_offers_nothing_costs_the_client_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeptPrompts, "keep", lambda *_: None)
    async with splitting(tmp_path) as split:
        await split.ask()
        assert split.computed == (WHOLE + 5, WHOLE + 5)
        record = split.gateway.serving._placements.ejection._replicas[ReplicaId(split.source.url)]
        assert record.num_failed == 1, "the source's failure counts against it"


async def test_a_prompt_of_another_length_is_never_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a shorter one it would end the target."""
    keep = KeptPrompts.keep
    monkeypatch.setattr(KeptPrompts, "keep", lambda *given: keep(*given) | {"remote_num_tokens": 5})
    async with splitting(tmp_path) as split:
        await split.ask()
        assert split.computed == (WHOLE + 5, WHOLE + 5)


async def test_what_a_dead_target_never_fetches_counts_on_its_source_as_long_as_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with splitting(tmp_path) as split:

        async def breaks(_: object) -> None:
            for connection in list(split.target._http.connections):
                connection.transport.abort()

        monkeypatch.setattr(sources, "_ask_for_kept", breaks)
        began = asyncio.get_running_loop().time()
        answer = await split.ask()
        assert (await split.ask(url=split.source.url))["choices"] == answer["choices"]
        scheduler = split.gateway.serving.scheduler
        source = ReplicaId(split.source.url)
        kept = split.source.engine.scheduler.num_used_blocks * BLOCK
        assert kept == WHOLE, "the emulated source waits for the target"
        uses = scheduler._in_flight._tracker._kept
        assert max(use.until for use in uses) >= began + KV_LEASE_S
        assert scheduler.snapshot().replicas[source].in_use_tokens == WHOLE + 5


async def test_the_client_that_leaves_leaves_nothing(tmp_path: Path) -> None:
    async with splitting(tmp_path, lease_s=2.0) as split:
        with pytest.raises(TimeoutError):
            async with aiohttp.ClientSession(split.gateway.url, timeout=aiohttp.ClientTimeout(total=0.02)) as http:
                body = {"prompt": list(range(1, 30_000)), "max_tokens": 4}
                async with http.post("/v1/completions", json=body) as answer:
                    await answer.read()
        await idle(split.gateway)
        for server in (split.source, split.target):
            await eventually(lambda server=server: server.engine.scheduler.num_used_blocks == 0, "it keeps nothing")


async def test_splits_begin_when_the_check_has_seen_a_right_one(tmp_path: Path) -> None:
    async with splitting(tmp_path, parity=True) as split:
        links = split.gateway.serving.scheduler._cluster.links
        await eventually(lambda: links.groups, "a fetched prompt was answered as its source does")
        await split.ask(prompt=Random(1).choices(range(1000), k=WHOLE))
        assert split.gateway.serving.recent.latest(1)


async def test_splits_that_the_check_has_seen_wrong_never_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = KeptPrompts.take
    monkeypatch.setattr(KeptPrompts, "take", lambda *given: KeptKv(take(*given).blocks, is_other=True))
    async with splitting(tmp_path, parity=True) as split:
        replicas = split.gateway.serving.replicas.values()

        def was_seen() -> bool:
            reports = [one.parity for one in replicas if one.parity is not None]
            found = [finding for report in reports for finding in report.findings]
            return any(one.check is Check.COPY and one.outcome is ParityOutcome.MISMATCH for one in found)

        await eventually(was_seen, "the check has seen a wrong text")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (TransferConfig("NixlConnector", "kv_producer", "recompute"), "kv_role"),
        (TransferConfig("NixlConnector", "kv_both", "fail"), "recompute"),
        (TransferConfig("NixlConnector", "kv_both"), "recompute"),
        (TransferConfig("NixlConnector", "kv_both", "recompute", TierConfig(bidirectional_kv_xfer=True)), "bidirec"),
        (TransferConfig("NixlConnector", "kv_both", "recompute", TierConfig(kv_lease_duration=0.0)), "lease"),
        (TransferConfig("NixlConnector", "kv_both", "recompute"), None),
    ],
)
def test_what_a_replica_must_say_to_split(config: TransferConfig, reason: str | None) -> None:
    found = config.against_splits()
    assert found is None if reason is None else found is not None and reason in found
