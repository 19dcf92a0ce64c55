"""KV events of the emulated replica: on the wire as vLLM's, and as the vLLM adapter understands them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from preble.core.types import BlocksEvicted, BlocksStored, CacheCleared, KvEvent, ReplicaId, namespace_of, pack_tokens
from preble.emulator import EmulatorConfig, EmulatorServer
from preble.emulator.answers.placeholders import EmulatedMedia
from preble.emulator.kv.events import KvEventPublisher, wire_events
from preble.engines import connect
from preble.errors import ConfigError
from support.kv_changes import changes_of
from support.waiting import PATIENCE_S

BLOCK = 16
END = (-1).to_bytes(8, "big", signed=True)
R = ReplicaId("r")


@asynccontextmanager
async def emulator(**changes: Any) -> AsyncIterator[EmulatorServer]:
    defaults = {"profile": "tiny-cpu", "speed": 100.0, "kv_tokens": 10 * BLOCK, "events_port": 0}
    async with EmulatorServer(EmulatorConfig(**(defaults | changes))) as server:
        yield server


async def ask(server: EmulatorServer, method: str, path: str, **body: Any) -> Any:
    async with aiohttp.ClientSession() as http, http.request(method, server.url + path, json=body) as answer:
        assert answer.status == 200
        return await answer.json()


async def post(server: EmulatorServer, path: str, **body: Any) -> None:
    """Send this and expect it to be done."""
    async with aiohttp.ClientSession() as http, http.post(server.url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()


async def complete(server: EmulatorServer, start: int, num_tokens: int, **more: Any) -> None:
    prompt = list(range(start, start + num_tokens))
    await ask(server, "POST", "/v1/completions", prompt=prompt, max_tokens=1, **more)


async def replay(server: EmulatorServer, start: int = 0) -> list[list[bytes]]:
    """Everything that the replay socket has from `start` on, each batch as [topic, seq, payload]."""
    [source] = (await ask(server, "GET", "/kv_event_sources")).values()
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(source["replay_endpoint"])
        await socket.send_multipart([b"", start.to_bytes(8, "big")])
        batches = []
        async with asyncio.timeout(PATIENCE_S):
            while True:
                empty, *batch = await socket.recv_multipart()
                assert empty == b""
                if batch[1] == END:
                    assert batch == [b"", END, b""]
                    return batches
                batches.append(batch)


def events_in(batches: list[list[bytes]]) -> list[dict[str, Any]]:
    return [event for _, _, payload in batches for event in msgspec.msgpack.decode(payload)[1]]


async def test_a_stored_prompt_is_published_as_vllm_publishes_it() -> None:
    async with emulator(events_topic="kv@tiny") as server:
        await complete(server, 0, 40)
        [[topic, seq, payload]] = await replay(server)
        hashes = server.engine.scheduler.cached_hashes()
    assert (topic, seq) == (b"kv@tiny", (0).to_bytes(8, "big"))
    timestamp, [event], rank = msgspec.msgpack.decode(payload)
    assert isinstance(timestamp, float)
    assert rank == 0
    assert set(event.pop("block_hashes")) == hashes
    assert event == {
        "type": "BlockStored",
        "parent_block_hash": None,
        "token_ids": list(range(32)),
        "block_size": 16,
        "extra_keys": [None, None],
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


async def test_evictions_are_published_one_by_one_before_what_took_their_place() -> None:
    async with emulator() as server:
        await complete(server, 0, 6 * BLOCK)
        await complete(server, 1000, 6 * BLOCK)
        events = events_in(await replay(server))
        cached = server.engine.scheduler.cached_hashes()
    assert [event["type"] for event in events] == ["BlockStored", "BlockRemoved", "BlockRemoved", "BlockStored"]
    first = events[0]["block_hashes"]
    assert [event["block_hashes"] for event in events[1:3]] == [[first[5]], [first[4]]]
    assert cached == {*first[:4], *events[3]["block_hashes"]}


async def test_the_blocks_of_a_later_turn_name_their_parent() -> None:
    async with emulator() as server:
        await complete(server, 0, 2 * BLOCK)
        await complete(server, 0, 4 * BLOCK)
        first, second = events_in(await replay(server))
    assert second["parent_block_hash"] == first["block_hashes"][-1]
    assert second["token_ids"] == list(range(2 * BLOCK, 4 * BLOCK))


async def test_a_salt_stands_at_the_first_block() -> None:
    async with emulator() as server:
        await complete(server, 0, 2 * BLOCK, cache_salt="mine")
        [event] = events_in(await replay(server))
    assert event["extra_keys"] == [["mine"], None]


async def test_a_reset_is_published_at_once() -> None:
    async with emulator() as server:
        await complete(server, 0, 2 * BLOCK)
        await ask(server, "POST", "/reset_prefix_cache")
        assert events_in(await replay(server))[1:] == [{"type": "AllBlocksCleared"}]


async def test_a_hit_publishes_nothing() -> None:
    async with emulator() as server:
        await complete(server, 0, 2 * BLOCK)
        await complete(server, 0, 2 * BLOCK)
        assert len(await replay(server)) == 1


async def test_replay_starts_where_it_is_asked_to() -> None:
    async with emulator() as server:
        for i in range(3):
            await complete(server, 1000 * i, BLOCK)
        assert [int.from_bytes(seq, "big") for _, seq, _ in await replay(server, start=1)] == [1, 2]


async def test_nonsense_on_the_replay_socket_is_survived() -> None:
    async with emulator() as server:
        [source] = (await ask(server, "GET", "/kv_event_sources")).values()
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(source["replay_endpoint"])
            await socket.send_multipart([b"what?"])
            await socket.send_multipart([b"", b"short"])
        assert await replay(server) == []


async def test_without_a_port_no_events_are_announced() -> None:
    async with emulator(events_port=None) as server:
        [source] = (await ask(server, "GET", "/kv_event_sources")).values()
    assert not source["enable_kv_cache_events"]
    assert source["publisher"] == "null"


async def test_the_vllm_adapter_sees_the_cache_as_it_is() -> None:
    """Stores, evictions and a reset, before and after it connects."""
    async with emulator() as server:
        await complete(server, 0, 6 * BLOCK)
        at = connect(server.url)
        try:
            found = await at.probe()
            stream = changes_of(found.engine.follow_kv_events)
            believed: set[Any] = set()
            async with asyncio.timeout(PATIENCE_S):
                await follow(stream, believed, server)
                await complete(server, 1000, 6 * BLOCK)
                await follow(stream, believed, server)
                await ask(server, "POST", "/reset_prefix_cache")
                await follow(stream, believed, server)
        finally:
            await at.close()
    info = found.info
    assert info.engine == "emulator"
    assert info.models == ("tiny-cpu",)
    assert (info.spec.kv_capacity_tokens, info.spec.block_size, info.spec.reports_events) == (160, BLOCK, True)
    assert believed == set()


async def follow(stream: AsyncIterator[KvEvent], believed: set[Any], server: EmulatorServer) -> None:
    """Take in events until what is believed to be cached is what is cached."""
    before = set(believed)
    while believed != server.engine.scheduler.cached_hashes() or believed == before:
        match await anext(stream):
            case BlocksStored() as stored:
                believed |= set(stored.block_hashes)
            case BlocksEvicted() as evicted:
                believed -= set(evicted.block_hashes)
            case CacheCleared():
                believed.clear()


async def test_a_port_that_is_taken_is_refused() -> None:
    async with emulator() as server:
        [source] = (await ask(server, "GET", "/kv_event_sources")).values()
        port = int(source["endpoint"].rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"cannot publish KV events at tcp://127.0.0.1:{port}"):
            KvEventPublisher(EmulatorConfig(profile="tiny-cpu", events_port=port))


def test_only_a_prompts_first_block_bears_the_namespace() -> None:
    stored = BlocksStored(R, (7,), 3, pack_tokens(range(4)), 4, "adapter")
    [event] = wire_events([stored], EmulatedMedia(1))
    assert msgspec.to_builtins(event)["extra_keys"] == [None]


async def test_an_adapter_loaded_at_run_time_has_a_cache_and_events_of_its_own() -> None:
    async with emulator() as server:
        await post(server, "/v1/load_lora_adapter", lora_name="sql", lora_path="anywhere")
        at = connect(server.url)
        try:
            found = await at.probe()
            assert (found.info.models, found.info.adapters) == (("tiny-cpu", "sql"), ("sql",))
            prompt = list(range(2 * BLOCK + 1))
            for model in ("tiny-cpu", "sql", "sql"):
                usage = (await ask(server, "POST", "/v1/completions", model=model, prompt=prompt))["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * BLOCK
            events = changes_of(found.engine.follow_kv_events)
            namespaces: set[str] = set()
            async with asyncio.timeout(PATIENCE_S):
                async for event in events:
                    if isinstance(event, BlocksStored):
                        namespaces.add(event.namespace)
                    if namespaces == {"", namespace_of("sql")}:
                        break
            await post(server, "/v1/unload_lora_adapter", lora_name="sql")
            assert await found.engine.models() == (("tiny-cpu",), (), ("tiny-cpu",))
        finally:
            await at.close()
