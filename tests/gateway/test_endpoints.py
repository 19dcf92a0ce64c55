"""Every endpoint of the engines through the gateway, before emulated replicas and scripted ones."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from gateway.conftest import Serve
from gateway.fakes import FakeReplica, replicas, running, status
from preble import __version__
from preble.build import commit
from preble.config import AuthConfig, HealthConfig, LimitsConfig, ReplicaConfig, TimeoutsConfig
from preble.emulator.config import EmulatorConfig
from preble.emulator.server import EmulatorServer
from preble.engines import connect
from preble.errors import EngineRefused
from preble.gateway.server import Gateway
from preble.prompts.endpoints.table import ENDPOINTS
from support.gateways import gateway_before, idle
from support.waiting import eventually

LONG = "Of what a long story tells, most is told twice, and this is how it goes on. " * 20
HEALTH = HealthConfig(check_interval_s=0.2, retry_min_s=0.02, retry_max_s=0.1)
TOOL = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}


@dataclass
class Emulated:
    """A gateway before emulated replicas."""

    gateway: Gateway
    http: aiohttp.ClientSession
    servers: list[EmulatorServer]

    async def post(self, path: str, status: int = 200, **body: Any) -> tuple[Any, dict[str, str]]:
        async with self.http.post(path, json=body) as answer:
            content = await answer.read()
            assert answer.status == status, content
            return json.loads(content), {k.lower(): v for k, v in answer.headers.items()}

    async def events(self, path: str, **body: Any) -> list[tuple[str, Any]]:
        """Names and data of a stream's events."""
        async with self.http.post(path, json=body | {"stream": True}) as answer:
            assert answer.status == 200 and answer.content_type == "text/event-stream"
            blocks = (await answer.text()).strip().split("\n\n")
        pairs = [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]
        return [(p.get("event", ""), p["data"] if p["data"] == "[DONE]" else json.loads(p["data"])) for p in pairs]

    def finished(self) -> tuple[str | None, int | None, int | None]:
        """Outcome, output tokens and cached tokens of the last placement."""
        [last] = self.gateway.serving.recent.latest(1)
        return last.outcome, last.output_tokens, last.cached_tokens


@asynccontextmanager
async def emulated(count: int = 2, **changes: Any) -> AsyncIterator[Emulated]:
    async with AsyncExitStack() as stack:
        config = EmulatorConfig(profile="tiny-cpu", speed=50.0, kv_tokens=16384)
        servers = [await stack.enter_async_context(EmulatorServer(config)) for _ in range(count)]
        replicas = [ReplicaConfig(server.url) for server in servers]
        gateway = await stack.enter_async_context(gateway_before(replicas, health=HEALTH, **changes))
        http = await stack.enter_async_context(aiohttp.ClientSession(gateway.url))
        yield Emulated(gateway, http, servers)
        await idle(gateway)


PLACED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG, "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5, "model": "tiny-cpu"},
    "/v1/responses": {"input": LONG, "max_output_tokens": 5},
    "/generate": {"text": LONG, "sampling_params": {"max_new_tokens": 5}},
    "/inference/v1/generate": {"token_ids": list(range(500)), "sampling_params": {"max_tokens": 5}},
    "/invocations": {"prompt": LONG, "max_tokens": 5},
}


@pytest.mark.parametrize("path", [path for path in PLACED if path != "/invocations"])
async def test_a_repeated_prompt_goes_where_it_is_cached_and_its_tokens_are_counted(path: str) -> None:
    async with emulated() as cluster:
        _, first = await cluster.post(path, **PLACED[path])
        _, again = await cluster.post(path, **PLACED[path])
        assert again["x-preble-replica"] == first["x-preble-replica"]
        matched = int(again["x-preble-matched-tokens"])
        assert matched > 100
        await eventually(lambda: cluster.finished()[0] is not None)
        assert cluster.finished() == ("ok", 5, matched)
        events = await cluster.events(path, **PLACED[path])
        assert len(events) >= 5
        outcome, output_tokens, cached = cluster.finished()
        assert outcome == "ok" and output_tokens is not None and output_tokens >= 5 and cached in (None, matched)


async def test_the_same_conversation_is_one_prompt_on_three_endpoints() -> None:
    async with emulated() as cluster:
        chat = [{"role": "system", "content": LONG}, {"role": "user", "content": "Hi"}]
        _, first = await cluster.post("/v1/chat/completions", messages=chat, max_tokens=3)
        for path, body in (
            ("/v1/messages", {"system": LONG, "messages": chat[1:], "max_tokens": 3, "model": "tiny-cpu"}),
            ("/v1/responses", {"instructions": LONG, "input": "Hi", "max_output_tokens": 3}),
        ):
            _, headers = await cluster.post(path, **body)
            assert headers["x-preble-replica"] == first["x-preble-replica"]
            assert int(headers["x-preble-matched-tokens"]) > 100


async def test_anthropics_stream_and_beta_query() -> None:
    async with emulated(1) as cluster:
        events = await cluster.events("/v1/messages?beta=true", **PLACED["/v1/messages"])
        names = [name for name, _ in events]
        assert names[:2] == ["message_start", "content_block_start"] and names[-1] == "message_stop"
        await eventually(lambda: cluster.finished()[0] is not None)
        assert cluster.finished()[:2] == ("ok", 5)


async def test_tokens_of_a_message_are_counted_as_its_answer_counts_them() -> None:
    async with emulated(1) as cluster:
        body = PLACED["/v1/messages"] | {"system": "Be brief."}
        answer, _ = await cluster.post("/v1/messages", **body)
        body.pop("max_tokens")
        counted, _ = await cluster.post("/v1/messages/count_tokens", **body)
        usage = answer["usage"]
        assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


async def test_errors_have_the_form_that_the_endpoints_clients_know() -> None:
    async with emulated(1) as cluster:
        message, _ = await cluster.post("/v1/messages", 404, model="other", messages=[], max_tokens=1)
        assert message["type"] == "error" and message["error"]["type"] == "not_found_error"
        message, _ = await cluster.post(
            "/v1/messages", 400, model="tiny-cpu", messages=[{"role": "user", "content": "a"}]
        )
        assert message["error"]["type"] == "invalid_request_error"  # the replica's own
        response, _ = await cluster.post("/v1/responses", 400, model="tiny-cpu")
        assert response["error"]["param"] == "input"


async def test_a_key_may_come_as_anthropics_clients_send_it() -> None:
    async with emulated(1, auth=AuthConfig(api_keys=("k1",))) as cluster:
        refused, _ = await cluster.post("/v1/messages", 401, **PLACED["/v1/messages"])
        assert refused["error"]["type"] == "authentication_error"
        for path in ("/generate", "/invocations", "/v1/embeddings", "/tokenize", "/v1/responses/resp_1"):
            async with cluster.http.post(path, json={}) as answer:
                assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer"), path
        headers = {"x-api-key": "k1", "anthropic-version": "2023-06-01"}
        async with cluster.http.post("/v1/messages", json=PLACED["/v1/messages"], headers=headers) as answer:
            assert answer.status == 200


async def test_a_conversation_stays_with_the_replica_that_stored_it() -> None:
    async with emulated(3) as cluster:
        first, headers = await cluster.post("/v1/responses", **PLACED["/v1/responses"])
        for known in (True, False):
            if not known:  # as a gateway that has been restarted
                cluster.gateway.serving.stored._holders.clear()
            body = {"input": "And?", "previous_response_id": first["id"], "max_output_tokens": 3}
            _, other = await cluster.post("/v1/responses", **body)
            assert other["x-preble-replica"] == headers["x-preble-replica"]
        async with cluster.http.get(f"/v1/responses/{first['id']}") as answer:
            assert answer.status == 200 and (await answer.json())["id"] == first["id"]
        refused, _ = await cluster.post(f"/v1/responses/{first['id']}/cancel", 400)
        assert "background" in refused["error"]["message"]
        async with cluster.http.delete(f"/v1/responses/{first['id']}") as answer:
            assert (await answer.json())["deleted"]
        async with cluster.http.get("/v1/responses/resp_none") as answer:
            assert answer.status == 404 and (await answer.json())["error"]["code"] == "response_not_found"
        lost, _ = await cluster.post("/v1/responses", 404, input="And?", previous_response_id="resp_none")
        assert "not found" in lost["error"]["message"]


async def test_a_stored_response_is_only_for_the_tenant_that_was_answered() -> None:
    async with emulated(1, auth=AuthConfig(api_keys=("k1", "k2"))) as cluster:
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("k1", "k2"))
        async with cluster.http.post("/v1/responses", json=PLACED["/v1/responses"], headers=mine) as answer:
            path = f"/v1/responses/{(await answer.json())['id']}"
        continued = {"input": "And?", "previous_response_id": path.rpartition("/")[2], "max_output_tokens": 3}
        for headers, status in ((other, 404), (mine, 200)):
            async with cluster.http.get(path, headers=headers) as answer:
                assert answer.status == status
            async with cluster.http.post("/v1/responses", json=continued, headers=headers) as answer:
                assert answer.status == status
        async with cluster.http.delete(path, headers=other) as answer:
            assert answer.status == 404


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../sleep",
        "/v1/%2e%2e/sleep",
        "/v1//completions",
        "/v1/%252e%252e/sleep",
        "/v1/load_lora_adapter%3Fx=1",
        "/v1/load_lora_adapter/",
        "/v1/chat/completions/batch",
    ],
)
async def test_a_path_that_a_server_may_read_as_another_one_reaches_no_replica(path: str) -> None:
    async with emulated(1) as cluster:
        for kind in ("application/json", "application/octet-stream"):
            url = URL(cluster.gateway.url + path, encoded=True)
            async with (
                aiohttp.ClientSession() as http,
                http.post(url, data=b"{}", headers={"content-type": kind}) as answer,
            ):
                assert (answer.status, (await answer.json())["error"]["code"]) == (404, "not_found"), kind


async def test_requests_placed_by_load_choose_no_cache() -> None:
    async with emulated(1) as cluster:
        for field in ("cache_salt", "extra_key"):
            refused, _ = await cluster.post("/v1/embeddings", 400, model="m", input="a", **{field: "theirs"})
            assert field in refused["error"]["message"]


async def test_embeddings_are_placed_by_load_and_leave_nothing_in_the_index() -> None:
    async with emulated() as cluster:
        answer, _ = await cluster.post("/v1/embeddings", input=[LONG, "b"], model="tiny-cpu")
        assert [len(row["embedding"]) for row in answer["data"]] == [64, 64]
        _, headers = await cluster.post("/v1/embeddings", input=LONG)
        assert headers["x-preble-matched-tokens"] == "0"
        await eventually(lambda: cluster.finished()[0] is not None)
        assert cluster.finished() == ("ok", 0, None)
        missing, _ = await cluster.post("/v1/embeddings", 404, input="a", model="other")
        assert missing["error"]["code"] == "model_not_found"


BY_LOAD = tuple(path for path, endpoint in ENDPOINTS.items() if endpoint.by_load and not endpoint.of_tokens)
ANSWER = b'{"of": "the replica",  "spelled": "as it likes"}'


async def spelled_freely(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.Response:
    return web.Response(body=ANSWER, content_type="application/json")


async def test_every_path_placed_by_load_reaches_a_replica_of_its_model_and_comes_back_as_it_is(serve: Serve) -> None:
    paths = (*BY_LOAD, "/v1/new", "/v2/new/one")
    other = FakeReplica(models=[{"id": "other", "max_model_len": 8192}], paths=paths)
    async with running([FakeReplica(paths=paths), other]) as fakes, serve(fakes) as gateway:
        other.script.extend([spelled_freely] * len(paths))
        for path in paths:
            body = json.dumps({"model": "other", "input": path, "unknown": [None]}, indent=1).encode()
            async with gateway.http.post(path, data=body, headers={"content-type": "application/json"}) as answer:
                assert (answer.status, await answer.read()) == (200, ANSWER), path
                assert answer.headers["x-preble-replica"] == other.url
            assert other.bodies[-1] == body
        assert len(other.requests) == len(paths) > 17 and not fakes[0].requests


async def test_what_no_replica_serves_is_the_replicas_404() -> None:
    async with emulated() as cluster:
        answer, _ = await cluster.post("/v1/rerank", 404, query="a", documents=[])
        assert "not served by an emulated replica" in answer["error"]["message"]
        assert all(not replica.suspect.is_set() for replica in cluster.gateway.serving.replicas.values())


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/v1/chat/completion", "/v1/chat/completions"),
        ("POST", "/completions", "/v1/completions"),
        ("POST", "/v1/v1/completions", "/v1/completions"),
        ("GET", "/metric", "/metrics"),
    ],
)
async def test_a_mistyped_path_gets_the_nearest(method: str, path: str, meant: str) -> None:
    async with (
        emulated() as cluster,
        cluster.http.request(method, path, json={}) as answer,
    ):
        assert answer.status == 404 and f"did you mean {meant}?" in (await answer.json())["error"]["message"]


async def test_pages_for_probes_and_clients() -> None:
    async with emulated() as cluster:
        for path in ("/health", "/healthz", "/livez", "/ping", "/ready", "/readyz"):
            async with cluster.http.get(path) as answer:
                assert answer.status == 200, path
        async with cluster.http.get("/") as answer:
            links = re.findall('href="([^":]+)"', await answer.text())
            assert (answer.status, answer.content_type, links[0]) == (200, "text/html", "ui")
        for link in links:
            async with cluster.http.get(f"/{link}") as answer:
                assert answer.status == 200, link
        async with cluster.http.get("/version") as answer:
            assert await answer.json() == {"server": "preble", "version": __version__, "commit": commit()}
        async with cluster.http.post(cluster.servers[0].url + "/v1/load_lora_adapter", json={"lora_name": "a"}):
            pass
        await eventually(lambda: "a" in cluster.gateway.serving.replicas.models())
        async with cluster.http.get("/v1/models") as answer:
            cards = {card["id"]: card for card in (await answer.json())["data"]}
        assert cards["tiny-cpu"]["parent"] is None and cards["tiny-cpu"]["root"] == "tiny-cpu"
        assert (cards["a"]["parent"], cards["a"]["root"]) == ("tiny-cpu", "a")
        async with cluster.http.get("/v1/models/a") as answer:
            assert await answer.json() == cards["a"]
        async with cluster.http.get("/v1/models/none") as answer:
            assert answer.status == 404 and (await answer.json())["error"]["code"] == "model_not_found"


async def test_a_gateway_is_no_replica_of_another_one_unless_somebody_says_so() -> None:
    async with emulated() as cluster:
        url = str(cluster.gateway.url)
        for engine in ("auto", "openai"):
            server = connect(url, engine)
            try:
                found = await server.probe()
            except EngineRefused as error:
                assert engine == "auto" and f"{url} is a Preble gateway, not a replica" in str(error)
            else:
                assert (engine, found.info.engine) == ("openai", "openai") and found.info.models == ("tiny-cpu",)
            finally:
                await server.close()


async def test_an_empty_model_is_the_replicas_only_one() -> None:
    async with emulated(1) as cluster:
        await cluster.post("/v1/completions", prompt="a", max_tokens=1, model="")


async def test_a_stream_that_has_only_been_announced_moves_to_another_replica(serve: Serve) -> None:
    async def announces(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'event: response.created\ndata: {"type": "response.created"}\n\n')
        assert request.transport is not None
        request.transport.close()
        return response

    async def answers(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for name in ("response.created", "response.output_text.delta", "response.completed"):
            await response.write(f'event: {name}\ndata: {{"type": "{name}"}}\n\n'.encode())
        return response

    async with replicas(2, paths=("/v1/responses",)) as fakes, serve(fakes) as gateway:
        fakes[0].script.extend([announces] * 2)
        fakes[1].script.extend([answers] * 2)
        for _ in range(2):
            async with gateway.http.post("/v1/responses", json={"input": "a", "stream": True}) as answer:
                text = await answer.text()
            assert answer.status == 200 and text.count("event: response.created") == 1 and "completed" in text
        await gateway.idle()


# uploads


class Hearing(FakeReplica):
    """Takes sound files: what arrives is noted, piece by piece."""

    def __init__(self, **options: Any) -> None:
        super().__init__(paths=("/v1/audio/transcriptions",), **options)
        self.heard = bytearray()
        self.kinds: list[str] = []

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.kinds.append(request.headers["content-type"])
        self.headers.append(dict(request.headers))
        async for piece in request.content.iter_any():
            self.heard += piece
        return web.Response(body=b"what was said", content_type="text/plain")


def form(size: int, model: str = "tiny", *, model_first: bool = True) -> tuple[bytes, str]:
    head = b'--edge\r\nContent-Disposition: form-data; name="model"\r\n\r\n' + model.encode() + b"\r\n"
    file = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + bytes(size) + b"\r\n"
    return (head + file if model_first else file + head) + b"--edge--\r\n", "multipart/form-data; boundary=edge"


@pytest.mark.parametrize("model_first", [True, False])
async def test_a_sound_file_passes_as_it_comes_to_a_replica_of_its_model(serve: Serve, model_first: bool) -> None:
    fakes = [Hearing(), Hearing(models=[{"id": "whisper", "max_model_len": 448}])]
    async with running(fakes) as [_, whisper], serve(fakes) as gateway:
        body, kind = form(3_000_000, "whisper", model_first=model_first)
        headers = {"content-type": kind, "traceparent": "00-1-2-01"}
        async with gateway.http.post("/v1/audio/transcriptions", data=BytesIO(body), headers=headers) as answer:
            assert (answer.status, await answer.text()) == (200, "what was said")
            assert answer.headers["x-preble-replica"] == whisper.url
        assert bytes(whisper.heard) == body and whisper.kinds == [kind]
        assert whisper.headers[0]["traceparent"] == "00-1-2-01"
        await gateway.idle()


async def test_an_upload_is_not_kept(serve: Serve) -> None:
    fakes = [Hearing()]
    async with running(fakes) as [one], serve(fakes, limits=LimitsConfig(max_body_bytes=100_000)) as gateway:
        body, kind = form(20_000_000)
        arrived: list[float] = []

        async def slowly() -> AsyncIterator[bytes]:
            for i in range(0, len(body), 1_000_000):
                arrived.append(gateway.gateway.bodies.held)
                yield body[i : i + 1_000_000]
                await eventually(lambda i=i: len(one.heard) >= min(i, len(body) - 1))  # type: ignore[misc]

        async with gateway.http.post(
            "/v1/audio/transcriptions", data=slowly(), headers={"content-type": kind}
        ) as answer:
            assert answer.status == 200
        assert bytes(one.heard) == body and max(arrived) < 2_000_000


async def test_an_upload_over_the_limit_is_a_413(serve: Serve) -> None:
    fakes = [Hearing()]
    async with running(fakes), serve(fakes, limits=LimitsConfig(max_upload_bytes=1000)) as gateway:
        body, kind = form(5000)
        async with gateway.http.post("/v1/audio/transcriptions", data=body, headers={"content-type": kind}) as answer:
            assert answer.status == 413 and (await answer.json())["error"]["code"] == "request_too_large"
        await gateway.idle()


async def test_an_upload_whose_model_is_long_in_coming_is_given_up_though_each_piece_is_in_time(serve: Serve) -> None:
    fakes = [Hearing()]
    async with running(fakes) as [one], serve(fakes, timeouts=TimeoutsConfig(body_s=0.3)) as gateway:
        body, kind = form(10_000, model_first=False)
        bodies, answered = gateway.gateway.bodies, asyncio.Event()

        async def trickling() -> AsyncIterator[bytes]:
            has_arrived = False
            for i in range(1000):  # ten seconds, if nobody gives it up
                yield body[i : i + 1]
                await asyncio.sleep(0.01)
                has_arrived |= bodies.held > 0
                if has_arrived and not bodies.held:
                    await answered.wait()
                    return
            yield body[1000:]

        async with gateway.http.post(
            "/v1/audio/transcriptions", data=trickling(), headers={"content-type": kind}
        ) as answer:
            assert answer.status == 408
            error = (await answer.json())["error"]
            assert error["code"] == "request_timeout" and "with its model" in error["message"]
            answered.set()
        assert not one.heard
        await gateway.idle()


async def test_a_client_that_leaves_in_the_middle_of_its_upload_blames_nobody(serve: Serve) -> None:
    fakes = [Hearing()]
    async with running(fakes) as [one], serve(fakes) as gateway:
        body, kind = form(2_000_000)
        begun = asyncio.Event()

        async def breaking() -> AsyncIterator[bytes]:
            yield body[:1_000_000]
            begun.set()
            await asyncio.Event().wait()

        headers = {"content-type": kind}
        request = asyncio.create_task(gateway.http.post("/v1/audio/transcriptions", data=breaking(), headers=headers))
        await begun.wait()
        await eventually(lambda: len(one.heard) > 0)
        request.cancel()
        await gateway.idle()
        await eventually(lambda: [one.outcome for one in gateway.gateway.serving.recent.latest(1)] == ["aborted"])
        assert gateway.num_live == 1
        await one.stop()


async def test_a_client_that_resets_its_upload_is_noticed_though_the_replica_reads_nothing(serve: Serve) -> None:
    class Deaf(Hearing):
        async def _serve(self, request: web.Request) -> web.StreamResponse:
            await self.gate.wait()
            return await super()._serve(request)

    async with running([Deaf()]) as [one], serve([one]) as gateway:
        body, kind = form(40_000_000)
        url = URL(gateway.gateway.url)
        _, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: a\r\ncontent-type: {kind}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        connections = gateway.gateway._server.connections
        stuck = 0

        def is_stuck() -> bool:
            nonlocal stuck
            is_paused = any(it._is_read_paused for it in connections)
            stuck = stuck + 1 if is_paused else 0
            return stuck == 50  # until then, buffers may still take some

        await eventually(is_stuck)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await gateway.idle()
        await eventually(lambda: [one.outcome for one in gateway.gateway.serving.recent.latest(1)] == ["aborted"])
        one.gate.set()


async def test_an_upload_goes_to_another_replica_only_before_it_is_sent(serve: Serve) -> None:
    fakes = [Hearing(), Hearing()]
    async with running(fakes) as [dead, alive], serve(fakes) as gateway:
        await dead.stop()
        body, kind = form(10_000)
        for _ in range(2):
            async with gateway.http.post(
                "/v1/audio/transcriptions", data=body, headers={"content-type": kind}
            ) as answer:
                assert answer.status == 200
        assert bytes(alive.heard) == body * 2


# redirects


@pytest.mark.parametrize("body", [{"prompt": "a"}, {"prompt": ["a", "b"]}, {"prompt": "a", "stream": True}])
async def test_a_redirect_is_neither_followed_nor_the_replicas_failure(serve: Serve, body: dict[str, Any]) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        one.script.extend([status(307)] * 2)
        async with gateway.http.post("/v1/completions", json=body) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "not_found")
            assert "location" not in answer.headers
        await gateway.idle()
        outcomes = {decision.outcome for decision in gateway.gateway.serving.recent.latest(2)}
        assert "rejected" in outcomes and outcomes <= {"rejected", "aborted"}


# headers


async def test_every_connection_header_names_headers_that_do_not_pass(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        headers = [("connection", "x-hop"), ("x-hop", "1"), ("connection", "keep-alive"), ("x-end", "1")]
        async with gateway.http.post("/v1/completions", json={"prompt": "a"}, headers=CIMultiDict(headers)) as answer:
            assert answer.status == 200
        arrived = {name.lower() for name in one.headers[0]}
        assert "x-end" in arrived and "x-hop" not in arrived


async def test_headers_pass_but_for_those_of_connection_keys_and_routers(serve: Serve) -> None:
    passed = {
        "traceparent": "00-1-2-01",
        "baggage": "a=b",
        "b3": "1",
        "x-session-id": "s",
        "x-data-parallel-rank": "0",
        "x-tenant": "t",
        "user-agent": "mine/1",
        "anthropic-beta": "x",
    }
    kept = {
        "authorization": "Bearer k",
        "cookie": "a=b",
        "x-api-key": "k",
        "x-preble-priority": "batch",
        "x-override-bootstrap-host": "evil",
        "x-vllm-priority": "-5",
        "x-smg-routing-key": "k",
        "accept-encoding": "gzip",
        "connection": "x-hop",
        "x-hop": "1",
    }
    async with replicas(1) as [one], serve([one]) as gateway:
        async with gateway.http.post("/v1/completions", json={"prompt": "a"}, headers=passed | kept) as answer:
            assert answer.status == 200
        [arrived] = [{name.lower(): value for name, value in given.items()} for given in one.headers]
        assert {name: arrived.get(name) for name in passed} == passed
        of_routers = {"x-preble-priority", "x-override-bootstrap-host", "x-vllm-priority", "x-smg-routing-key"}
        assert not (of_routers | {"cookie", "x-api-key", "x-hop"}) & arrived.keys()
        assert arrived.get("authorization") != "Bearer k" and arrived["content-type"] == "application/json"
