"""Replicas that are added, drained, removed and changed while requests come: none is lost, and others are untouched."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from gateway.conftest import Serve, Served
from gateway.fakes import FakeReplica, gated, gated_stream, replicas
from preble.config import AuthConfig, DiscoveryConfig, GroupConfig
from preble.config.load import ConfigSources
from preble.core.costs.model import CostModel
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.registry import make_policy
from preble.gateway.server import Gateway, serving
from support.gateways import PROFILE
from support.kubernetes_api import kubernetes_api
from support.waiting import eventually

ADMIN = AuthConfig(admin_keys=("root",), api_keys=("alice",))
AS_ADMIN = {"Authorization": "Bearer root"}
FAST = """
port = 0
engine = "openai"
policy = "round_robin"
[health]
check_interval_s = 0.05
retry_min_s = 0.02
retry_max_s = 0.05
[parity]
enabled = false
[discovery]
file_interval_s = 0.05
dns_interval_s = 1.0
[auth]
admin_keys = ["root"]
"""


class Operator:
    """Speaks to `/replicas`."""

    def __init__(self, http: aiohttp.ClientSession, key: str | None = "root") -> None:
        self._http = http
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def ask(self, method: str, path: str = "", body: Any = None, **query: str) -> tuple[int, dict[str, Any]]:
        data = None if body is None else json.dumps(body)
        async with self._http.request(
            method, f"/replicas{path}", data=data, params=query, headers=self._headers
        ) as answer:
            return answer.status, await answer.json()

    async def rows(self) -> dict[str, dict[str, Any]]:
        _, page = await self.ask("GET")
        return {row["url"]: row for row in page["replicas"]}

    async def is_in_state(self, url: str, state: str | None) -> bool:
        row = (await self.rows()).get(url)
        return (row["state"] if row else None) == state


class Stream:
    """A steady stream of requests, one after the other in each of a few lines; `where` counts replicas by answers."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self.statuses: Counter[int] = Counter()
        self.where: Counter[str] = Counter()
        self.is_over = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as lines:
            for number in range(4):
                lines.create_task(self._line(number))

    async def _line(self, number: int) -> None:
        count = 0
        while not self.is_over:
            count += 1
            body = {"model": "tiny", "prompt": f"{number} {count}", "stream": count % 2 == 0}
            async with self._http.post("/v1/completions", json=body, headers=AS_ADMIN) as answer:
                text = await answer.text()
                is_whole = not body["stream"] or text.endswith("data: [DONE]\n\n")
                self.statuses[answer.status if is_whole else 0] += 1
                self.where[answer.headers["x-preble-replica"]] += 1

    async def reaches(self, url: str) -> None:
        """Wait until a further request goes there."""
        before = self.where[url]
        await eventually(lambda: self.where[url] > before, f"requests reach {url}")

    async def leaves(self, url: str) -> None:
        """Wait until requests go elsewhere only."""
        self.where.clear()
        await eventually(lambda: sum(self.where.values()) >= 20)
        assert self.where[url] <= 4, "at most those that were on their way"


@asynccontextmanager
async def steady(http: aiohttp.ClientSession) -> AsyncIterator[Stream]:
    """Requests come within the context; at its end none has failed."""
    stream = Stream(http)
    task = asyncio.create_task(stream.run())
    try:
        yield stream
    finally:
        stream.is_over = True
        await task
    assert stream.statuses.keys() == {200}, stream.statuses


@asynccontextmanager
async def from_file(path: Path, text: str) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    """A gateway whose configuration file is watched."""
    write(path, text)
    sources = ConfigSources(path, {}, {})
    scheduler = GlobalScheduler(make_policy("round_robin"), CostModel(PROFILE))
    async with (
        serving(sources.load(), scheduler, sources=sources) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        yield gateway, http
        await eventually(lambda: gateway.serving.num_in_flight == 0)
        scheduler.check()


def write(path: Path, text: str) -> None:
    path.write_text(text)


def listing(*fakes: FakeReplica) -> str:
    return f"replicas = {json.dumps([fake.url for fake in fakes])}\n"


# by hand


async def test_a_replica_is_added_drained_released_and_removed_by_hand_and_no_request_is_lost(serve: Serve) -> None:
    async with replicas(2) as [one, two], serve([one], auth=ADMIN) as gateway, steady(gateway.http) as stream:
        operator = Operator(gateway.http)
        status, row = await operator.ask("POST", body={"url": two.url})
        assert (status, row["state"], row["source"]) == (201, "joining", "api")
        await stream.reaches(two.url)
        assert (await operator.ask("POST", body=two.url))[0] == 200, "the same again changes nothing"

        status, row = await operator.ask("POST", "/drain", url=two.url)
        assert status == 200 and row["held_back"] == "drained by an operator"
        await eventually(lambda: operator.is_in_state(two.url, "drained"))
        assert (await operator.rows())[two.url]["safe_to_remove"] is True
        assert f'preble_replica_safe_to_remove{{replica="{two.url}"}} 1.0' in await metrics(gateway)
        assert f'preble_replica_state{{replica="{two.url}",state="drained"}} 1.0' in await metrics(gateway)
        await stream.leaves(two.url)

        await operator.ask("POST", "/undrain", url=two.url)
        await stream.reaches(two.url)

        assert (await operator.ask("DELETE", url=two.url))[0] in (200, 202)
        await eventually(lambda: operator.is_in_state(two.url, None))
        assert (await operator.ask("DELETE", url=two.url))[0] == 404
        await eventually(lambda: two.running == 0)
        assert two.url not in await metrics(gateway), "a fleet that changes for months leaves nothing behind"


async def test_a_drained_replica_keeps_what_is_known_of_its_cache(serve: Serve) -> None:
    async with replicas(2) as [one, two], serve([one, two], auth=ADMIN, policy="preble") as gateway:
        operator = Operator(gateway.http)

        async def ask() -> tuple[str, int]:
            body = {"model": "tiny", "prompt": "the same long beginning " * 20}
            async with gateway.http.post("/v1/completions", json=body, headers=AS_ADMIN) as answer:
                return answer.headers["x-preble-replica"], int(answer.headers["x-preble-matched-tokens"])

        first, _ = await ask()
        assert (await ask())[0] == first
        await operator.ask("POST", "/drain", url=first)
        other, _ = await ask()
        assert other != first
        await operator.ask("POST", "/drain", url=other)
        await operator.ask("POST", "/undrain", url=first)
        again, matched = await ask()
        assert again == first and matched > 0


async def test_what_runs_on_a_removed_replica_ends_before_it_is_gone(serve: Serve) -> None:
    async with replicas(2) as [one, two], serve([one, two], auth=ADMIN) as gateway:
        operator = Operator(gateway.http)
        for fake in (one, two):
            fake.script.append(gated)
        requests = [asyncio.create_task(ask(gateway)) for _ in range(2)]
        await eventually(lambda: one.running == two.running == 1)
        status, row = await operator.ask("DELETE", url=one.url)
        assert (status, row["state"], row["running"], row["source"]) == (202, "draining", 1, None)
        assert (await operator.ask("DELETE", url=one.url))[0] == 202, "the same again changes nothing"
        assert one.running == 1
        for fake in (one, two):
            fake.gate.set()
        assert [await request for request in requests] == [200, 200]
        await eventually(lambda: operator.is_in_state(one.url, None))


async def test_a_replica_that_is_removed_at_once_loses_only_answers_that_had_begun(serve: Serve) -> None:
    async with replicas(2) as [one, two], serve([one, two], auth=ADMIN) as gateway:
        for fake in (one, two):
            fake.script.append(gated)
        requests = [asyncio.create_task(ask(gateway)) for _ in range(2)]
        await eventually(lambda: one.running == two.running == 1)
        status, answer = await Operator(gateway.http).ask("DELETE", url=one.url, now="true")
        assert (status, answer) == (200, {"removed": one.url})
        await eventually(lambda: one.aborts == 1)
        two.gate.set()
        assert [await request for request in requests] == [200, 200], "the one without a byte has moved"


async def test_with_every_replica_drained_requests_are_refused_and_the_reason_is_seen(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one], auth=ADMIN) as gateway:
        operator = Operator(gateway.http)
        await operator.ask("POST", "/drain", url=one.url)
        assert await ask(gateway, "alice") == 503
        assert await ask(gateway, "root") == 503
        async with gateway.http.get("/ready", headers=AS_ADMIN) as page:
            assert (page.status, (await page.json())["members"][one.url]["state"]) == (503, "drained")
        await operator.ask("POST", "/undrain", url=one.url)
        assert await ask(gateway, "alice") == 200


async def test_a_drained_replica_that_restarts_stays_drained(serve: Serve) -> None:
    async with replicas(2) as [one, two], serve([one, two], auth=ADMIN) as gateway:
        operator = Operator(gateway.http)
        await operator.ask("POST", "/drain", url=one.url)
        await one.stop()
        await eventually(lambda: gateway.num_live == 1)
        await one.start()
        await eventually(lambda: gateway.num_live == 2)
        assert {await where(gateway) for _ in range(4)} == {two.url}
        row = (await operator.rows())[one.url]
        assert row["state"] == "drained" and row["last_error"] is None, "it is up"


async def test_only_admins_see_and_change_replicas_and_without_keys_nobody_changes_them(serve: Serve) -> None:
    async with replicas(1) as [one]:
        async with serve([one], auth=ADMIN) as gateway:
            for key, status in ((None, 401), ("alice", 403), ("root", 200)):
                assert (await Operator(gateway.http, key).ask("GET"))[0] == status
            assert (await Operator(gateway.http, "alice").ask("DELETE", url=one.url))[0] == 403
            async with gateway.http.get("/ready") as page:
                assert "members" not in await page.json()
        async with serve([one]) as gateway:
            nobody = Operator(gateway.http, None)
            assert (await nobody.ask("GET"))[0] == 200
            status, body = await nobody.ask("POST", body="http://evil:1")
            assert status == 403 and "auth.admin_keys" in body["error"]["message"]


async def test_wrong_questions_about_replicas_get_clear_answers(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one], auth=ADMIN) as gateway:
        operator = Operator(gateway.http)
        for method, path, body, query, status, said in (
            ("POST", "", {"ulr": "http://a:1"}, {}, 400, "unknown key 'ulr'; did you mean 'url'"),
            ("POST", "", [1], {}, 400, "neither a URL nor an object"),
            ("POST", "", "nonsense", {}, 400, "is not a URL"),
            ("POST", "", {"url": "http://a:1", "engine": "my:Engine"}, {}, 400, "only the configuration"),
            ("POST", "", {"url": "http://a:1", "engine": "vlm"}, {}, 400, "unknown engine 'vlm'"),
            ("POST", "", {"url": one.url, "engine": "vllm"}, {}, 409, "with other settings"),
            ("POST", "/drain", None, {}, 400, "?url="),
            ("POST", "/drain", None, {"url": "http://a:1"}, 404, "there is no replica"),
            ("DELETE", "", None, {"url": one.url, "now": "yes"}, 400, "neither true nor false"),
            ("PUT", "", None, {}, 405, "is not allowed here"),
            ("GET", "/drain", None, {}, 405, "is not allowed here"),
        ):
            found, answer = await operator.ask(method, path, body, **query)
            assert (found, said in answer["error"]["message"]) == (status, True), answer
        assert await operator.is_in_state(one.url, "live")


# the configuration file


async def test_replicas_join_and_leave_with_the_file_and_the_others_are_untouched(tmp_path: Path) -> None:
    path = tmp_path / "preble.toml"
    async with replicas(3) as [one, two, three], from_file(path, listing(one, two) + FAST) as (gateway, http):
        await eventually(lambda: len(gateway.serving.replicas) == 2)
        kept = gateway.serving.replicas[two.url]
        async with steady(http) as stream:
            await stream.reaches(one.url)
            write(path, listing(two, three) + FAST)
            await stream.reaches(three.url)
            await eventually(lambda: Operator(http).is_in_state(one.url, None))
            await stream.leaves(one.url)
        assert gateway.serving.replicas[two.url] is kept


async def test_a_file_behind_swapped_links_is_followed_as_kubernetes_mounts_it(tmp_path: Path) -> None:
    """A ConfigMap's file is a link to a file below `..data`, itself a link to a folder that is exchanged."""
    async with replicas(2) as [one, two]:
        for name, fakes in (("..1", (one,)), ("..2", (one, two))):
            (tmp_path / name).mkdir()
            (tmp_path / name / "preble.toml").write_text(listing(*fakes) + FAST)
        (tmp_path / "..data").symlink_to("..1")
        path = tmp_path / "preble.toml"
        path.symlink_to("..data/preble.toml")
        async with from_file_as_it_is(path) as gateway:
            await eventually(lambda: len(gateway.serving.replicas) == 1)
            (tmp_path / "..new").symlink_to("..2")
            (tmp_path / "..new").rename(tmp_path / "..data")
            await eventually(lambda: len(gateway.serving.replicas) == 2)


async def test_a_broken_file_changes_nothing_and_the_log_says_why(tmp_path: Path) -> None:
    structlog.reset_defaults()
    path = tmp_path / "preble.toml"
    async with replicas(2) as [one, two], from_file(path, listing(one) + FAST) as (gateway, _):
        await eventually(lambda: len(gateway.serving.replicas) == 1)
        kept = gateway.serving.replicas[one.url]
        with structlog.testing.capture_logs() as logs:
            for text, said in (
                ("replicas = [", "not valid TOML"),
                (listing(two) + 'polcy = "x"\n' + FAST, "did you mean 'policy'"),
                (listing() + FAST, "no replica given"),
                (listing(two) + FAST + 'keys_file = "/missing"\n', "'/missing' cannot be read"),
                (f'replicas = [{{ url = "{two.url}", engine = "vlm" }}]\n' + FAST, "unknown engine 'vlm'"),
                (listing(two) + FAST + "[[groups]]\nport = 1\n", "exactly one of"),
                (listing(two) + FAST + '[[groups]]\ndns = "a"\n', "needs a `port`"),
            ):
                write(path, text)
                await eventually(lambda said=said: any(said in str(entry.get("error")) for entry in logs), said)
            path.unlink()
            await eventually(lambda: any("cannot be read" in str(entry.get("error")) for entry in logs))
        assert not [entry for entry in logs if entry["event"] == "reloaded"]
        assert dict(gateway.serving.replicas) == {one.url: kept}
        write(path, listing(one, two) + FAST)
        await eventually(lambda: len(gateway.serving.replicas) == 2)


async def test_a_replica_with_other_settings_joins_anew_and_what_runs_there_ends(tmp_path: Path) -> None:
    path = tmp_path / "preble.toml"
    async with replicas(1) as [one], from_file(path, listing(one) + FAST) as (gateway, http):
        await eventually(lambda: len(gateway.serving.replicas) == 1)
        before = gateway.serving.replicas[one.url]
        one.script.append(gated_stream)
        body = {"model": "tiny", "prompt": "a", "stream": True}
        async with http.post("/v1/completions", json=body, headers=AS_ADMIN) as answer:
            await answer.content.readany()
            write(path, f'replicas = [{{ url = "{one.url}", kv_events_topic = "other" }}]\n' + FAST)
            await eventually(lambda: gateway.serving.replicas.get(one.url) not in (None, before))
            async with http.post("/v1/completions", json={"prompt": "b"}, headers=AS_ADMIN) as other:
                assert other.status == 200
            one.gate.set()
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def test_settings_change_while_serving_and_those_that_cannot_are_named(tmp_path: Path) -> None:
    structlog.reset_defaults()
    path = tmp_path / "preble.toml"
    async with replicas(1) as [one], from_file(path, listing(one) + FAST) as (gateway, http):
        await eventually(lambda: len(gateway.serving.replicas) == 1)
        assert await status_of(http, "root") == 200
        text = FAST.replace("port = 0", "port = 1").replace('["root"]', '["other"]').replace("round_robin", "e2")
        with structlog.testing.capture_logs() as logs:
            write(path, listing(one) + text + "[limits]\nmax_body_bytes = 200\n[queue]\nclasses = ['fast', 'slow']\n")
            await eventually(lambda: any(entry["event"] == "restart_needed" for entry in logs))
        [warned] = [entry for entry in logs if entry["event"] == "restart_needed"]
        assert warned["settings"] == ["policy", "port"]
        assert await status_of(http, "root") == 401
        assert await status_of(http, "other") == 200
        assert await status_of(http, "other", prompt="x" * 300) == 413
        assert await status_of(http, "other", **{"x-preble-priority": "slow"}) == 200
        assert await status_of(http, "other", **{"x-preble-priority": "batch"}) == 400


# Kubernetes


async def test_kubernetes_adds_drains_and_removes_replicas_and_no_request_is_lost(serve: Serve, tmp_path: Path) -> None:
    async with (
        kubernetes_api("endpointslices", tmp_path) as (api, kubeconfig),
        at_addresses("127.0.0.1", "127.0.0.2", "127.0.0.3") as (port, urls),
    ):

        def endpoint(number: int, uid: str = "", **conditions: bool) -> dict[str, Any]:
            ref = {"kind": "Pod", "uid": uid or f"uid-{number}"}
            return {"addresses": [f"127.0.0.{number}"], "conditions": {"ready": True, **conditions}, "targetRef": ref}

        async def publish(*endpoints: dict[str, Any]) -> None:
            ports = [{"name": "http", "port": port}]
            head = {"metadata": {"name": "vllm-x"}, "addressType": "IPv4", "ports": ports}
            await api.put({**head, "endpoints": list(endpoints)})

        await publish(endpoint(1), endpoint(2))
        group = GroupConfig(service="vllm", namespace="prod", port="http")
        discovery = DiscoveryConfig(kubeconfig=kubeconfig)
        async with (
            serve([], live=2, groups=(group,), discovery=discovery, auth=ADMIN) as gateway,
            steady(gateway.http) as stream,
        ):
            operator = Operator(gateway.http)
            await publish(endpoint(1), endpoint(2), endpoint(3))
            await stream.reaches(urls[2])
            kept = gateway.gateway.serving.replicas[urls[1]]
            await publish(endpoint(1, ready=False, terminating=True), endpoint(2), endpoint(3))
            await eventually(lambda: operator.is_in_state(urls[0], "drained"))
            await publish(endpoint(2), endpoint(3))
            await eventually(lambda: operator.is_in_state(urls[0], None))
            before = gateway.gateway.serving.replicas[urls[2]]
            await publish(endpoint(2), endpoint(3, uid="another pod"))
            live = gateway.gateway.serving.replicas
            await eventually(lambda: live.get(urls[2]) not in (None, before))
            await stream.reaches(urls[2])
            assert live[urls[1]] is kept, "an unchanged pod is untouched"


# helpers


async def metrics(gateway: Served) -> str:
    async with gateway.http.get("/metrics", headers=AS_ADMIN) as page:
        return await page.text()


async def ask(gateway: Served, key: str = "root") -> int:
    return await status_of(gateway.http, key)


async def status_of(http: aiohttp.ClientSession, key: str, prompt: str = "hello", **headers: str) -> int:
    body, given = {"model": "tiny", "prompt": prompt}, {"Authorization": f"Bearer {key}", **headers}
    async with http.post("/v1/completions", json=body, headers=given) as answer:
        return answer.status


async def where(gateway: Served) -> str:
    async with gateway.http.post("/v1/completions", json={"prompt": "hello"}, headers=AS_ADMIN) as answer:
        return answer.headers["x-preble-replica"]


@asynccontextmanager
async def from_file_as_it_is(path: Path) -> AsyncIterator[Gateway]:
    sources = ConfigSources(path, {}, {})
    async with serving(sources.load(), sources=sources) as gateway:
        yield gateway


@asynccontextmanager
async def at_addresses(*addresses: str) -> AsyncIterator[tuple[int, list[str]]]:
    """A replica at each address, all at one port."""
    fakes = [FakeReplica(address=address) for address in addresses]
    try:
        for fake in fakes:
            fake.port = fakes[0].port
            await fake.start()
        yield fakes[0].port, [fake.url for fake in fakes]
    finally:
        for fake in fakes:
            await fake.stop()
