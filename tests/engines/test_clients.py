"""What the clients make of what a server says of itself, over real sockets against canned answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from aiohttp import web
from structlog.testing import capture_logs

from preble.core.types import CacheCleared, ReplicaId, Role
from preble.engines import Engine, Found, HttpClient, KvEventEndpoints, connect
from preble.engines.adapter import EngineLoad, PriorityOrder
from preble.engines.registry import engine_class
from preble.engines.reporting import reachable
from preble.engines.starting.ports import free_ports
from preble.engines.vllm import client as vllm
from preble.engines.vllm.answers import read_cache_config
from preble.engines.vllm.client import VllmEngine
from preble.errors import ConfigError, EngineProtocolError, EngineRefused, EngineTimeout, RequestError
from support.kv_changes import changes_of
from support.kv_publisher import ScriptedPublisher, stored
from support.waiting import eventually
from support.web_app import listening

MODELS = {"data": [{"id": "sql", "parent": "base"}, {"id": "base", "max_model_len": 4096}]}
METRICS = 'vllm:num_requests_running{engine="0"} 0.0\nvllm:cache_config_info{block_size="32",num_gpu_blocks="65"} 1.0\n'
SOURCE = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://0.0.0.0:5558", "topic": "kv"}
VLLM = {
    "/v1/models": MODELS,
    "/version": {"version": "0.32.0"},
    "/metrics": METRICS,
    "/kv_event_sources": {"0": SOURCE},
}


@dataclass
class Answer:
    """A canned answer; a plain value stands for one of status 200."""

    body: Any = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@asynccontextmanager
async def url_of(answers: Mapping[str, Any]) -> AsyncIterator[str]:
    """The URL of a server that answers these paths, and 404 for any other."""

    async def respond(request: web.Request) -> web.Response:
        answer = answers.get(request.path, Answer(status=404))
        if not isinstance(answer, Answer):
            answer = Answer(answer)
        text = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
        return web.Response(text=text, status=answer.status, headers=answer.headers)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", respond)
    async with listening(app) as url:
        yield url


@asynccontextmanager
async def client_of(
    answers: Mapping[str, Any], engine: str, *, replica_id: str = "r", kv_events: KvEventEndpoints | None = None
) -> AsyncIterator[Engine]:
    """The client that this adapter is of a server that answers these paths."""
    async with url_of(answers) as url:
        client = engine_class(engine)(HttpClient(url, ReplicaId(replica_id)), kv_events)
        try:
            yield client
        finally:
            await client.close()


async def found_at(answers: Mapping[str, Any], engine: str = "auto") -> Found:
    """What a probe finds at a server that answers these paths. Its client is closed."""
    async with url_of(answers) as url:
        server = connect(url, engine)
        try:
            return await server.probe()
        finally:
            await server.close()


async def test_vllm_configures_itself_from_the_replica() -> None:
    async with client_of(VLLM, "vllm", replica_id="r7") as client:
        info = await client.probe()
        assert isinstance(client, VllmEngine)
        assert client.kv_event_endpoints == KvEventEndpoints("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "kv")
    assert (info.engine, info.version) == ("vllm", "0.32.0")
    assert (info.models, info.adapters) == (("base", "sql"), ("sql",)), "the base model comes first"
    spec = info.spec
    assert (spec.replica_id, spec.kv_capacity_tokens, spec.block_size) == ("r7", 64 * 32, 32)
    assert (spec.max_prompt_tokens, spec.reports_events) == (4096, True)


async def test_a_vllm_that_is_slow_to_say_where_its_tier_is_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_INFO_S", 0.0)  # ships 5 s
    tier = {"type": "p2p", "host": "10.0.0.1", "port": 5710}
    transfer = {"kv_connector_extra_config": {"secondary_tiers": [tier]}}
    tiers = METRICS + "# HELP vllm:kv_offload_tiering_read_bytes_total Bytes\n"
    info = {"vllm_config": {"kv_transfer_config": transfer}}
    async with client_of({**VLLM, "/metrics": tiers, "/server_info": info}, "vllm") as client:
        for _ in range(vllm._MOST_LATE - 1):
            with pytest.raises(EngineTimeout, match="did not say"):
                await client.probe()
        await client.probe()
        assert client.kv_peer is None, "it joins without"
        monkeypatch.setattr(vllm, "_INFO_S", 60.0)  # ships 5 s
        await client.probe()
        assert client.kv_peer == "10.0.0.1:5710"


@pytest.mark.parametrize("way", ["p2p", "nixl"])
async def test_vllm_with_another_data_type_is_in_another_transfer_group(way: str) -> None:
    """`auto` beside `bfloat16` is, too: NIXL compares the words, and here nobody knows what a quantized model makes of
    it.
    """
    tier = {"secondary_tiers": [{"type": "p2p", "host": "10.0.0.1", "port": 5710}]}
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    transfer = nixl if way == "nixl" else {"kv_connector_extra_config": tier}
    name = {"p2p": "vllm:kv_offload_tiering_read_bytes_total", "nixl": "vllm:nixl_xfer_time_seconds"}[way]
    groups = []
    for of_model, of_cache in (
        ("torch.bfloat16", "auto"),
        ("torch.bfloat16", "auto"),
        ("torch.float16", "auto"),
        ("torch.bfloat16", "bfloat16"),
        ("torch.bfloat16", "fp8"),
    ):
        metrics = METRICS.replace("block_size=", f'cache_dtype="{of_cache}",block_size=') + f"# HELP {name} Some\n"
        info = {"vllm_config": {"kv_transfer_config": transfer, "model_config": {"dtype": of_model}}}
        groups.append((await found_at({**VLLM, "/metrics": metrics, "/server_info": info})).info.spec.transfer_group)
    assert groups[0] == groups[1] and len(set(groups)) == 4 and "" not in groups, groups


async def test_the_emulator_says_that_it_is_one_and_has_no_placeholder_block() -> None:
    header = {"X-Preble-Emulated": "tiny-cpu"}
    answers = {
        **VLLM,
        "/version": Answer({"version": "1"}, headers=header),
        "/metrics": Answer(METRICS, headers=header),
    }
    info = (await found_at(answers)).info
    assert (info.engine, info.spec.kv_capacity_tokens) == ("emulator", 65 * 32)


async def test_an_unknown_server_is_taken_for_a_plain_openai_one() -> None:
    found = await found_at({"/v1/models": MODELS})
    info = found.info
    assert (info.engine, info.models, info.max_model_len) == ("openai", ("base", "sql"), 4096)
    await found.engine.follow_kv_events(pytest.fail)


@pytest.mark.parametrize(
    "sources",
    [
        Answer(status=404),
        {},
        {"0": {**SOURCE, "enable_kv_cache_events": False}},
        {"0": {**SOURCE, "publisher": "null"}},
        {"0": {"publisher": "zmq", "endpoint": None}},
        {"0": SOURCE, "1": SOURCE},
    ],
    ids=["unknown path", "none", "off", "null publisher", "no address", "those of two ranks"],
)
async def test_a_replica_without_events_of_its_own_reports_none(sources: Any) -> None:
    async with client_of({**VLLM, "/kv_event_sources": sources}, "vllm") as client:
        info = await client.probe()
        assert not info.spec.reports_events
        await client.follow_kv_events(pytest.fail)


TWO_RANKS = (METRICS + METRICS.replace('engine="0"', 'engine="1"')).replace('"65"', '"130"')


def of_ranks(metrics: str) -> str:
    """Metrics whose cache configuration bears a rank, as vLLM's do, and the number of blocks of all ranks together."""
    return metrics.replace("cache_config_info{", 'cache_config_info{engine="0",', 1).replace(
        "cache_config_info{block", 'cache_config_info{engine="1",block'
    )


async def test_each_rank_of_a_server_is_a_replica_with_events_of_its_own() -> None:
    second = {**SOURCE, "endpoint": "tcp://*:5567", "replay_endpoint": None}
    answers = {**VLLM, "/metrics": of_ranks(TWO_RANKS), "/kv_event_sources": {"0": SOURCE, "1": second}}
    found = await found_at(answers, "vllm")
    assert [rank.engine.rank for rank in found.ranks] == [0, 1]
    url = found.engine.url
    assert [rank.info.spec.replica_id for rank in found.ranks] == [f"{url}#0", f"{url}#1"]
    assert all(rank.info.spec.kv_capacity_tokens == 64 * 32 for rank in found.ranks), "as each rank has"
    assert all(rank.info.spec.reports_events for rank in found.ranks)
    assert [endpoints.endpoint for endpoints in found.info.kv_events] == [
        "tcp://127.0.0.1:5557",
        "tcp://127.0.0.1:5567",
    ]


async def test_the_events_of_ranks_are_looked_for_at_the_given_port_and_those_that_follow() -> None:
    given = KvEventEndpoints("tcp://10.0.0.5:5557", "tcp://10.0.0.5:6557", "kv")
    async with client_of({**VLLM, "/metrics": of_ranks(TWO_RANKS)}, "vllm", kv_events=given) as client:
        info = await client.probe()
    assert info.kv_events == (given, KvEventEndpoints("tcp://10.0.0.5:5558", "tcp://10.0.0.5:6558", "kv"))


async def test_ranks_for_whose_events_no_port_is_left_are_an_error_that_says_so() -> None:
    given = KvEventEndpoints("tcp://10.0.0.5:65535")
    for adapter, answers in (("vllm", VLLM | {"/metrics": of_ranks(TWO_RANKS)}), ("sglang", sglang(dp_size=2))):
        async with client_of(answers, adapter, kv_events=given) as client:
            with pytest.raises(EngineProtocolError, match=r"has 2 ranks, and each takes the next port.*65536"):
                await client.probe()


async def test_ranks_of_which_only_some_publish_report_no_events() -> None:
    async with client_of({**VLLM, "/metrics": of_ranks(TWO_RANKS)}, "vllm") as client:
        info = await client.probe()
        assert len(client.ranks()) == 2
        assert not info.spec.reports_events
        for rank in client.ranks():
            await rank.follow_kv_events(pytest.fail)


async def test_the_ranks_of_a_server_stay_the_same_objects_while_it_has_as_many() -> None:
    async with client_of({**VLLM, "/metrics": of_ranks(TWO_RANKS)}, "vllm") as client:
        await client.probe()
        before = client.ranks()
        await client.probe()
        assert client.ranks() == before


async def test_endpoints_that_are_given_are_not_asked_for() -> None:
    given = KvEventEndpoints("tcp://10.0.0.5:5557")
    answers = {**VLLM, "/kv_event_sources": Answer(status=500)}
    async with client_of(answers, "vllm", kv_events=given) as client:
        assert (await client.probe()).spec.reports_events
        assert isinstance(client, VllmEngine)
        assert client.kv_event_endpoints == given


async def test_a_replica_without_metrics_has_a_cache_of_unknown_size() -> None:
    async with client_of({**VLLM, "/metrics": Answer(status=404)}, "vllm") as client:
        spec = (await client.probe()).spec
    assert (spec.kv_capacity_tokens, spec.block_size) == (None, 16)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v1/models", {"data": []}),
        ("/v1/models", {"models": []}),
        ("/v1/models", "<html>"),
        ("/v1/models", {"data": [{"id": "x" * 5000}]}),
        ("/version", {"version": 1}),
        ("/metrics", 'vllm:cache_config_info{block_size="32"} many\n'),
        ("/metrics", 'vllm:cache_config_info{block_size="32} 1.0\n'),
        pytest.param("/metrics", METRICS.replace("65", "6" * 5000), id="more digits than Python reads"),
        ("/kv_event_sources", [1]),
        ("/kv_event_sources", {"0": {**SOURCE, "endpoint": "somewhere"}}),
        ("/kv_event_sources", {"0": {**SOURCE, "endpoint": 5}}),
    ],
)
async def test_an_answer_of_another_shape_breaks_the_protocol(path: str, answer: Any) -> None:
    async with client_of({**VLLM, path: answer}, "vllm") as client:
        with pytest.raises(EngineProtocolError, match="replica r at http://127"):
            await client.probe()


async def test_a_replica_that_wants_a_key_says_so() -> None:
    async with client_of({"/v1/models": Answer(status=401)}, "openai") as client:
        with pytest.raises(EngineRefused, match="status 401; give its API key"):
            await client.probe()


async def test_a_replica_whose_engine_is_dead_is_not_ready() -> None:
    async with client_of({"/health": Answer(status=503)}, "vllm") as client:
        with pytest.raises(EngineRefused, match="/health with status 503"):
            await client.check_ready()


async def test_token_ids_come_from_the_server() -> None:
    async with client_of({"/tokenize": {"tokens": [1, 2, 3], "count": 3}}, "openai") as client:
        assert await client.tokenize(b'{"prompt": "abc"}') == [1, 2, 3]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "prompt is missing", "param": "prompt"}}, "prompt is missing"),
        ({"message": "prompt is missing"}, "prompt is missing"),
        ("<html>", "the engine cannot tokenize this request"),
    ],
)
async def test_a_body_that_the_server_does_not_like_is_the_clients_fault(body: Any, message: str) -> None:
    async with client_of({"/tokenize": Answer(body, status=400)}, "openai") as client:
        with pytest.raises(RequestError, match=message):
            await client.tokenize(b"{}")


async def test_a_server_without_tokenize_says_what_to_do() -> None:
    async with client_of({}, "openai") as client:
        with pytest.raises(EngineRefused, match="--tokenizer"):
            await client.tokenize(b"{}")


@pytest.mark.parametrize("status", [500, 503, 401, 429])
async def test_a_server_that_cannot_tokenize_now_is_not_the_clients_fault(status: int) -> None:
    async with client_of({"/tokenize": Answer(status=status)}, "openai") as client:
        with pytest.raises(EngineRefused, match=f"status {status}"):
            await client.tokenize(b"{}")


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown engine 'sglong'; known: auto, vllm, sglang, openai"):
        connect("http://127.0.0.1:1", "sglong")


SGLANG_SOURCE = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "dp_size": 1}


def sglang(**source: Any) -> dict[str, Any]:
    """What an SGLang server answers whose description of its events is changed so."""
    info = {"enable_cache_report": True, "kv_events": {**SGLANG_SOURCE, **source}}
    return {"/v1/models": MODELS, "/server_info": info, "/v1/loads": {"version": "0.5.23"}}


@pytest.mark.parametrize(
    ("flags", "order"),
    [
        ({}, None),
        ({"enable_priority_scheduling": False, "schedule_low_priority_values_first": True}, None),
        ({"enable_priority_scheduling": True}, PriorityOrder(-1, is_required=True)),
        (
            {"enable_priority_scheduling": True, "schedule_low_priority_values_first": True},
            PriorityOrder(1, is_required=True),
        ),
    ],
)
async def test_sglang_says_how_it_orders_by_priority(flags: dict[str, bool], order: PriorityOrder | None) -> None:
    pages = sglang()
    pages["/server_info"].update(flags)
    async with client_of(pages, "sglang") as client:
        assert (await client.probe()).priority == order


@pytest.mark.parametrize(
    ("version", "order"),
    [
        ("0.31.9", None),
        ("0.32.0", PriorityOrder(1)),
        ("0.40.1.dev3+cpu", PriorityOrder(1)),
        ("1.0", PriorityOrder(1)),
        ("dev", None),
    ],
)
async def test_a_vllm_that_may_refuse_a_priority_gets_none(version: str, order: PriorityOrder | None) -> None:
    async with client_of({**VLLM, "/version": {"version": version}}, "vllm") as client:
        assert (await client.probe()).priority == order


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_sglang_says_its_fixed_role_and_where_its_bootstrap_server_is(role: str) -> None:
    answers = sglang()
    answers["/server_info"] |= {"disaggregation_mode": role, "disaggregation_bootstrap_port": 9100}
    async with client_of(answers, "sglang") as client:
        assert (await client.probe()).spec.role == role
        assert client.kv_peer == ("127.0.0.1:9100" if role == "prefill" else None)
        answers["/server_info"]["disaggregation_mode"] = "null"
        assert (await client.probe()).spec.role == "mixed"
        assert client.kv_peer is None


@pytest.mark.parametrize("mode", ["null", "prefill"])
async def test_a_role_that_sglang_does_not_have_is_said_and_does_not_count(mode: str) -> None:
    answers = sglang()
    answers["/server_info"] |= {"disaggregation_mode": mode}
    async with url_of(answers) as url:
        server = connect(url, "sglang", role=Role.DECODE)
        with capture_logs() as logs:
            spec = (await server.probe()).info.spec
        await server.close()
    said = [(line["given"], line["role"]) for line in logs if line["event"] == "role_differs"]
    assert said == [("decode", spec.role)] and spec.role is not Role.DECODE


async def test_sglang_with_another_transfer_or_data_type_or_a_given_group_is_in_another_transfer_group() -> None:
    groups = []
    for backend, dtype, given in (
        ("mooncake", "auto", ""),
        ("mooncake", "auto", ""),
        ("nixl", "auto", ""),
        ("mooncake", "fp8_e4m3", ""),
        ("mooncake", "auto", "zone-1"),
    ):
        answers = sglang()
        answers["/server_info"] |= {
            "disaggregation_mode": "prefill",
            "disaggregation_transfer_backend": backend,
            "kv_cache_dtype": dtype,
        }
        async with url_of(answers) as url:
            server = connect(url, "sglang", transfer_group=given)
            groups.append((await server.probe()).info.spec.transfer_group)
            await server.close()
    assert groups[0] == groups[1] and len(set(groups)) == 4, groups


@pytest.mark.parametrize("caches", [False, True])
async def test_sglang_that_decodes_reports_what_it_caches_only_if_it_keeps_prefixes(caches: bool) -> None:
    answers = sglang(publisher="zmq", endpoint_port_base=5557)
    answers["/server_info"] |= {
        "disaggregation_mode": "decode",
        "disaggregation_decode_enable_radix_cache": caches,
    }
    async with client_of(answers, "sglang") as client:
        assert (await client.probe()).spec.reports_events == caches


async def test_sglang_that_says_where_it_pushes_its_load_has_one() -> None:
    async with client_of(sglang(load_endpoint_port_base=5559), "sglang") as client:
        assert client.loads() is None, "not before it was asked"
        await client.probe()
        loads = client.loads()
        assert loads is not None


async def test_sglang_without_a_load_of_its_own_pushes_none() -> None:
    async with client_of(sglang(dp_size=2), "sglang") as client:
        await client.probe()
        assert client.loads() is None and all(rank.loads() is None for rank in client.ranks())


async def test_each_rank_of_sglang_pushes_its_own_load() -> None:
    first, second = free_ports(2)
    with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as busy, context.socket(zmq.PUB) as idle:
        idle.bind(f"tcp://127.0.0.1:{first}")
        busy.bind(f"tcp://127.0.0.1:{second}")
        async with client_of(sglang(dp_size=2, load_endpoint_port_base=first), "sglang") as client:
            await client.probe()
            loads = [rank.loads() for rank in client.ranks()]
            told: list[EngineLoad | None] = [None, None]

            async def follow(rank: int) -> None:
                async for load in loads[rank] or ():  # type: ignore[union-attr]
                    told[rank] = load

            async def both_are_told() -> bool:
                for socket, running in ((idle, 0), (busy, 7)):
                    stat = msgspec.msgpack.encode(["LoadStat", running, 0, 0])
                    await socket.send_multipart([b"load", bytes(8), stat])
                return told == [EngineLoad(0, 0, 0), EngineLoad(7, 0, 0)]

            following = [asyncio.create_task(follow(rank)) for rank in range(2)]
            await eventually(both_are_told, "each rank's load is its own")
            for task in following:
                task.cancel()


async def test_each_rank_of_sglang_publishes_at_the_port_after_the_one_before() -> None:
    async with client_of(sglang(dp_size=2, replay_endpoint_port_base=6557), "sglang") as client:
        info = await client.probe()
        assert [rank.rank for rank in client.ranks()] == [0, 1]
    assert [(e.endpoint[-5:], (e.replay or "")[-5:]) for e in info.kv_events] == [
        (":5557", ":6557"),
        (":5558", ":6558"),
    ]


@pytest.mark.parametrize(
    "source",
    [{"load_endpoint_port_base": 65_536}, {"load_endpoint_port_base": "5559"}, {"endpoint_host": "a b"}],
    ids=["no port", "a text", "no host"],
)
async def test_sglang_that_publishes_at_no_address_breaks_the_protocol(source: Any) -> None:
    async with client_of(sglang(**source), "sglang") as client:
        with pytest.raises(EngineProtocolError):
            await client.probe()


async def test_sglangs_events_start_over_when_asked_to() -> None:
    async with ScriptedPublisher() as publisher:
        given = publisher.endpoints
        async with client_of(sglang(), "sglang", kv_events=given, replica_id="r0") as client:
            await client.probe()
            events = changes_of(client.follow_kv_events)
            await publisher.publish(stored(1))
            begun = [await anext(events), await anext(events)]
            client.resync_kv_events()
            again = [await anext(events), await anext(events)]
    assert begun == again
    assert begun[0] == CacheCleared(ReplicaId("r0"), is_past=True)


def test_cache_configuration_is_read_from_metrics_with_gaps() -> None:
    assert read_cache_config("", has_null_block=True).capacity_tokens is None
    line = 'vllm:cache_config_info{block_size="128",num_gpu_blocks="None"} 1.0'
    cache = read_cache_config(line, has_null_block=True)
    assert (cache.block_size, cache.num_blocks) == (128, None)


@pytest.mark.parametrize(
    "address",
    ["", "tcp://*:5557", "tcp://host", "http://host:1", "tcp://ho st:1", "tcp://host:0", "tcp://[::1]:65536"],
)
def test_an_address_that_cannot_be_connected_to_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="no address for KV events"):
        KvEventEndpoints(address)


def test_host_names_stay_names() -> None:
    assert reachable("tcp://*:5557", "engine-3.local") == "tcp://engine-3.local:5557"
