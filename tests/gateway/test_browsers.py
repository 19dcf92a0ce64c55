"""Pages of other origins that ask from a browser (CORS)."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway.conftest import Serve
from gateway.fakes import FakeReplica, replicas
from preble.config import AuthConfig, BrowsersConfig
from preble.config.load import load
from preble.errors import ConfigError
from support.browser import Tab, browser

PAGE = "https://chat.example"
ASKS = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
CHAT = """async (url, path) => {
  const body = JSON.stringify({model: "tiny", prompt: "hello", stream: true});
  const headers = {"authorization": "Bearer k1", "content-type": "application/json", "x-request-id": "mine"};
  try {
    const answer = await fetch(url + path, path === "/v1/completions" ? {method: "POST", headers, body} : {headers});
    return [answer.status, answer.headers.get("x-request-id"), (await answer.text()).trim().slice(-12)];
  } catch (error) {
    return [0, null, error.name];
  }
}"""


async def asked(tab: Tab, url: str, path: str) -> list[object]:
    """What a page's script sees: status, request id and the end of the text; no status if the browser forbids it."""
    return list(await tab.eval(f"({CHAT})({url!r}, {path!r})"))


@pytest.mark.clients
async def test_a_page_in_a_real_browser_asks_and_reads_what_it_may(serve: Serve, tmp_path: Path) -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<title>a chat</title>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/", page)
    async with TestServer(app) as site, browser(tmp_path) as tab, replicas(1) as [one]:
        origin = str(site.make_url("/")).rstrip("/")
        await tab.open(origin)
        auth = AuthConfig(api_keys=("k1",), admin_keys=("an-admin",))
        async with serve([one], auth=auth, browsers=BrowsersConfig((origin,))) as gateway:
            url = gateway.gateway.url
            assert await asked(tab, url, "/v1/completions") == [200, "mine", "data: [DONE]"]
            assert (await asked(tab, url, "/v1/models"))[0] == 200
            assert (await asked(tab, url, "/v1/responses/resp_none"))[0] == 404, "an error is read, too"
            assert (await asked(tab, url, "/metrics"))[0] == 0
        for others in ((PAGE,), ()):
            async with serve([one], auth=auth, browsers=BrowsersConfig(others)) as gateway:
                assert (await asked(tab, gateway.gateway.url, "/v1/completions"))[0] == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/models", "/v1/responses/resp_1"])
async def test_a_browser_hears_what_a_page_may_send(serve: Serve, path: str) -> None:
    auth = AuthConfig(api_keys=("k1",))
    async with replicas(1) as [one], serve([one], auth=auth, browsers=BrowsersConfig((PAGE,))) as gateway:
        async with gateway.http.options(path, headers=ASKS) as answer:
            assert answer.status == 200 and answer.headers["access-control-allow-origin"] == PAGE
            assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
            assert "POST" in answer.headers["access-control-allow-methods"] and answer.headers["vary"] == "Origin"
        async with gateway.http.options(path, headers=ASKS | {"origin": "https://other.example"}) as answer:
            assert "access-control-allow-origin" not in answer.headers
        async with gateway.http.post("/v1/completions", json={}, headers={"origin": PAGE}) as answer:
            assert answer.status == 401 and answer.headers["access-control-allow-origin"] == PAGE


async def test_every_page_may_ask_with_a_star_and_none_without_origins(serve: Serve) -> None:
    async with replicas(1) as [one]:
        async with serve([one], browsers=BrowsersConfig(("*",))) as gateway:
            assert (await gateway.complete())[2]["access-control-allow-origin"] == "*"
            async with gateway.http.options("/replicas", headers=ASKS) as answer:
                assert answer.status == 405 and "access-control-allow-origin" not in answer.headers
        async with serve([one]) as gateway:
            assert "access-control-allow-origin" not in (await gateway.complete())[2]
            async with gateway.http.options("/v1/completions", headers=ASKS) as answer:
                assert answer.status == 405


async def test_what_a_replica_says_about_pages_does_not_count(serve: Serve) -> None:
    async def behave(_: FakeReplica, __: web.Request, ___: dict[str, Any]) -> web.Response:
        return web.json_response({"choices": []}, headers={"Access-Control-Allow-Origin": "*", "X-Engine": "fake"})

    async with replicas(1) as [one], serve([one], browsers=BrowsersConfig((PAGE,))) as gateway:
        one.script.append(behave)
        _, _, headers = await gateway.complete()
        assert headers["x-engine"] == "fake" and "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "origin", ["chat.example", "https://chat.example/", "https://Chat.example", "https://*.example"]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"browsers.origins: .* is no origin; write https"):
        load(None, {"PREBLE_BROWSERS__ORIGINS": origin}, {"replicas": ["http://a:1"]})


BODIES = {"/v1/completions": b'{"prompt": "a"}', "/v1/embeddings": b'{"input": "a"}', "/v1/new": b"{}"}
FORMS = ["text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", None]


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("path", [*BODIES, "/replicas", "/debug/parity"])
async def test_what_a_browser_sends_for_any_page_is_refused(serve: Serve, path: str, kind: str | None) -> None:
    headers = {"origin": "http://evil.example"} | ({} if kind is None else {"content-type": kind})
    async with replicas(1) as [one], serve([one]) as gateway:
        skipped = ["content-type"] if kind is None else []
        body = BODIES.get(path, b"{}")
        async with gateway.http.post(path, data=body, headers=headers, skip_auto_headers=skipped) as answer:
            told = (await answer.json())["error"]
        assert (answer.status, told["code"], one.requests) == (415, "unsupported_media_type", [])
        assert "`browsers.origins`" in told["message"]


async def test_a_form_with_a_file_from_any_page_is_refused(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        form = {"model": "tiny", "file": BytesIO(b"sound")}
        headers = {"origin": "http://evil.example"}
        async with gateway.http.post("/v1/audio/transcriptions", data=form, headers=headers) as answer:
            assert (answer.status, one.requests) == (415, [])


@pytest.mark.parametrize("kind", FORMS)
async def test_a_program_needs_no_type_nor_does_a_page_that_is_named(serve: Serve, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    async with replicas(1) as [one], serve([one], browsers=BrowsersConfig((PAGE,))) as gateway:
        for more in ({}, {"origin": PAGE}):
            sent = {"data": BODIES["/v1/completions"], "headers": headers | more}
            skipped = ["content-type"] if kind is None else []
            async with gateway.http.post("/v1/completions", **sent, skip_auto_headers=skipped) as answer:  # type: ignore[arg-type]
                assert answer.status == 200


OPERATORS = ["/debug/decisions", "/debug/replicas", "/replicas", "/ui/picture", "/ui/events"]


@pytest.mark.parametrize("path", OPERATORS)
async def test_operators_data_is_shown_under_no_name_that_a_page_may_have(serve: Serve, path: str) -> None:
    """DNS rebinding: the page's own name leads to this machine."""
    evil = {"host": "evil.example:8000"}
    async with replicas(1) as [one], serve([one]) as gateway, gateway.http.get(path, headers=evil) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (403, "unknown_host")
    auth = AuthConfig(api_keys=("k1",), admin_keys=("an-admin",))
    async with replicas(1) as [one], serve([one], auth=auth) as gateway:
        headers = {"host": "llm.corp.example", "x-api-key": "an-admin"}
        async with gateway.http.get(path, headers=headers) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    "host",
    [
        "10.1.2.3:8000",
        "[fd00::5]",
        "localhost",
        "preble",
        "preble.prod.svc:8000",
        "p.prod.svc.cluster.local",
        "llm.corp",
    ],
)
async def test_addresses_and_names_of_a_network_are_known(serve: Serve, host: str) -> None:
    browsers, headers = BrowsersConfig(hosts=("llm.corp",)), {"host": host}
    async with replicas(1) as [one], serve([one], browsers=browsers) as gateway:
        assert (await gateway.http.get("/debug/decisions", headers=headers)).status == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", "/version"])
async def test_probes_and_scrapes_may_use_any_name(serve: Serve, path: str) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        assert (await gateway.http.get(path, headers={"host": "probe.example"})).status == 200


async def test_a_page_under_its_own_name_may_not_ask_where_there_are_no_keys(serve: Serve) -> None:
    headers = {"origin": "http://evil.example:8000", "host": "evil.example:8000"}
    async with replicas(1) as [one], serve([one]) as gateway:
        async with gateway.http.post("/v1/completions", json={"prompt": "a"}, headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (403, "unknown_host")
        async with gateway.http.post(
            "/v1/completions", json={"prompt": "a"}, headers=headers | {"host": "localhost"}
        ) as ok:
            assert ok.status == 200
