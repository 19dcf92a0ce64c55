"""The live page: who may see it, what it is fed with, and what a real Chromium makes of it."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.conftest import Serve, Served
from gateway.fakes import replicas
from preble.config import AuthConfig
from preble.core.types import Role
from preble.gateway.http.access import KeyRing
from preble.gateway.pages import live
from support import drawn_fleet as drawn
from support.browser import Tab, browser
from support.drawn_fleet import Day, drawn_fleet, work
from support.waiting import eventually

AUTH = AuthConfig(api_keys=("of-a-client",), admin_keys=("of-an-admin",))
ADMIN = {"authorization": "Bearer of-an-admin"}
PICTURES = Path(__file__).parents[2] / "docs" / "howto" / "live-page"
PROMPT = "a beginning that several requests share, long enough for some blocks " * 3


async def pictures(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


async def first_picture(gateway: Served) -> dict[str, Any]:
    async with gateway.http.get("/ui/events") as answer:
        return await anext(pictures(answer))


async def test_anybody_may_load_the_page_and_only_an_admin_what_it_shows(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one], auth=AUTH) as gateway:
        async with gateway.http.get("/ui") as answer:
            page = await answer.text()
            assert answer.status == 200 and one.url not in page
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        for headers, status in (({}, 401), ({"authorization": "Bearer of-a-client"}, 403), (ADMIN, 200)):
            async with gateway.http.get("/ui/events", headers=headers) as answer:
                assert answer.status == status
        async with gateway.http.get("/ui/events?key=of-an-admin") as answer:
            assert answer.status == 401, "a key in an address ends up in logs"


def test_the_page_asks_nobody_else_for_anything() -> None:
    html = Path(live.__file__).with_name("live.html").read_text(encoding="utf-8")
    assert re.findall(r"(?:src|href|url)\s*[=(]", html) == []
    assert set(re.findall(r"https?://[^\s\"'`)\\]+", html)) <= {"http://www.w3.org/2000/svg"}


async def test_the_picture_has_the_fleet_the_prefixes_and_the_decisions(serve: Serve) -> None:
    async with replicas(2) as fakes, serve(fakes, policy="preble") as gateway:
        for end in ("one", "two", "three"):
            assert (await gateway.complete(prompt=PROMPT + end, stream=False))[0] == 200
        picture = await first_picture(gateway)
        assert [row["name"] for row in picture["replicas"]] == [fake.url for fake in fakes]
        assert {row["state"] for row in picture["replicas"]} == {"live"}
        [hot] = [row for row in picture["prefixes"] if row["uses"] == 3]
        assert (hot["parent"], hot["start"]) == (None, 0) and hot["end"] >= len(PROMPT)
        assert hot["request_id"] == picture["decisions"][0]["request_id"], "the last one, which has ended"
        assert len(picture["decisions"]) == 3 and picture["counts"]["placed"] == 3
        newest = picture["decisions"][0]
        assert newest["candidates"][0]["replica"] == newest["replica"], "the chosen one comes first"


async def test_a_replica_that_is_down_is_in_the_picture_with_its_error(serve: Serve) -> None:
    async with replicas(2) as [one, two], serve([one, two]) as gateway:
        await two.stop()
        await eventually(lambda: gateway.num_live == 1)
        rows = {row["name"]: row for row in (await first_picture(gateway))["replicas"]}
        assert rows[two.url]["state"] == "down" and rows[two.url]["error"]


async def test_the_stream_ends_with_the_key_and_with_the_gateway(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "EVERY_S", 0.01)  # ships 1 s
    async with replicas(1) as [one], serve([one], auth=AUTH) as gateway:
        config, keys = gateway.gateway.config, gateway.gateway.keys
        for end in ("key", "gateway"):
            async with gateway.http.get("/ui/events", headers=ADMIN) as answer:
                await anext(pictures(answer))
                if end == "key":
                    another = KeyRing(AuthConfig(admin_keys=("another",)), config.queue.classes)
                    gateway.gateway._app.reconfigure(config, another)
                else:
                    gateway.gateway.drain()
                await answer.content.read()  # comes to its end
            gateway.gateway._app.reconfigure(config, keys)


async def test_so_many_may_watch_and_no_more(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_MAX_WATCHING", 1)  # ships 32
    monkeypatch.setattr(live, "EVERY_S", 0.01)  # ships 1 s
    async with replicas(1) as [one], serve([one]) as gateway:
        async with gateway.http.get("/ui/events") as watching:
            await anext(pictures(watching))
            async with gateway.http.get("/ui/events") as answer:
                assert answer.status == 429

        async def may_watch() -> bool:
            async with gateway.http.get("/ui/events") as answer:
                return answer.status == 200

        await eventually(may_watch, "who has left makes room")


async def test_all_who_watch_get_the_same_picture(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        taken = 0
        picture = gateway.gateway.serving.picture

        def counted() -> Any:
            nonlocal taken
            taken += 1
            return picture()

        monkeypatch.setattr(live, "EVERY_S", 1000.0)  # ships 1 s: here each picture is made once
        monkeypatch.setattr(gateway.gateway.serving, "picture", counted)
        found = await asyncio.gather(*(first_picture(gateway) for _ in range(5)))
        assert taken == 1 and all(one == found[0] for one in found)


# in a browser


@asynccontextmanager
async def watching(url: str, folder: Path, **window: Any) -> AsyncIterator[Tab]:
    """A tab with the page, once it shows something."""
    async with browser(folder) as tab:
        await tab.open(f"{url}/ui", **window)
        await tab.until("!document.getElementById('main').hidden")
        yield tab
        assert tab.errors == []


@pytest.mark.clients
async def test_the_page_asks_for_a_key_sends_it_as_a_header_and_shows_the_fleet(serve: Serve, tmp_path: Path) -> None:
    async with replicas(2) as fakes, serve(fakes, auth=AUTH) as gateway, browser(tmp_path) as tab:
        await tab.open(f"{gateway.gateway.url}/ui")
        await tab.until("!document.getElementById('door').hidden")
        for key, says in (("wrong", "There is no such key."), ("of-a-client", "This key is not an admin's.")):
            await give(tab, key)
            await tab.until(f'document.getElementById("refused").textContent === "{says}"')
        await give(tab, "of-an-admin")
        await tab.until("document.querySelectorAll('#fleet tbody tr').length === 2")
        await tab.until("document.getElementById('status').dataset.is === 'live'")
        assert {url.split("?")[0] for url in tab.requested} <= {
            f"{gateway.gateway.url}{p}" for p in ("/ui", "/ui/events", "/favicon.ico")
        }
        assert not [url for url in tab.requested if "of-an-admin" in url]


async def give(tab: Tab, key: str) -> None:
    await tab.eval(f'document.getElementById("key").value = "{key}"; document.querySelector("#ask button").click()')


@pytest.mark.clients
async def test_the_page_follows_what_happens_and_a_decision_opens(serve: Serve, tmp_path: Path) -> None:
    async with (
        replicas(2) as fakes,
        serve(fakes, policy="preble") as gateway,
        watching(gateway.gateway.url, tmp_path) as tab,
    ):
        assert await tab.eval("document.querySelectorAll('#decisions li').length") == 0
        for end in ("one", "two"):
            await gateway.complete(prompt=PROMPT + end)
        await tab.until("document.querySelectorAll('#decisions li').length === 2")
        await tab.until("document.querySelectorAll('#prefixes li').length > 0")
        await tab.eval("document.querySelector('#decisions details').open = true")
        await tab.until("document.querySelectorAll('#decisions .candidate').length === 2")
        await tab.eval("document.getElementById('pause').click()")
        await gateway.complete(prompt="after the pause")
        await tab.eval("document.getElementById('pause').click()")
        await tab.until("document.querySelectorAll('#decisions li').length === 3")
        assert await tab.eval("document.querySelector('#decisions details[open]') !== null"), "it stays open"


@pytest.mark.clients
async def test_the_page_marks_roles_and_the_groups_of_those_that_send_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_each = ({"role": Role.PREFILL, "block_size": 16}, {"role": Role.DECODE, "block_size": 32}, {})
    for number, spec in enumerate(of_each, 1):
        monkeypatch.setitem(drawn.SPECS, f"http://gpu-{number}:8000", spec)
    async with drawn_fleet(3) as gateway, watching(gateway.url, tmp_path) as tab:
        marks = "[...document.querySelectorAll('#fleet tbody tr')].map(tr => tr.lastChild.lastChild)"
        assert await tab.eval(f"{marks}.map(mark => mark.textContent)") == ["prefill, group 1", "decode, group 2", ""]
        assert await tab.eval(f"{marks}.map(mark => mark.hidden)") == [False, False, True]
        assert (await tab.eval(f"{marks}[1].title")).endswith(f" {drawn.MODEL} 32")


def luminance(colour: str) -> float:
    """Of a colour as CSS writes it, by WCAG's definition."""
    digits = colour.strip().lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.clients
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_every_text_stands_out_and_every_control_has_a_name(tmp_path: Path, dark: bool) -> None:
    async with drawn_fleet(2) as gateway, watching(gateway.url, tmp_path, dark=dark) as tab:
        get = "getComputedStyle(document.documentElement).getPropertyValue"
        of = {
            name: luminance(await tab.eval(f"{get}('--{name}')"))
            for name in ("bg", "card", "faint", "ink", "muted", "accent", "warm", "bad")
        }
        for text in ("ink", "muted", "accent", "warm", "bad"):
            for under in ("bg", "card", "faint"):
                low, high = sorted((of[text], of[under]))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (text, under)
        tree = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
        controls = [
            n for n in tree if n.get("role", {}).get("value") in ("button", "textbox", "link", "DisclosureTriangle")
        ]
        assert controls and [n for n in controls if not n.get("name", {}).get("value")] == []


TAILS = """
const one = (name, parent, start, end, uses, request_id) =>
  ({ name, parent, start, end, uses, request_id, holders: [], partly: [] });
last = { ...last, up_s: 30, prefixes: [one("system", null, 0, 100, 9, "newest"), one("a", 0, 100, 200, 5, ""),
  one("a2", 1, 200, 300, 4, ""), one("a3", 2, 300, 400, 3, ""), one("b", 0, 100, 150, 4, "")] };
showPrefixes(last, name => name);
"""


@pytest.mark.clients
async def test_a_hot_prefix_has_a_request_and_the_tails_of_conversations_are_folded(
    serve: Serve, tmp_path: Path
) -> None:
    async with replicas(1) as [one], serve([one]) as served, watching(served.gateway.url, tmp_path) as tab:
        await tab.until("last !== null")
        await tab.eval("document.getElementById('pause').click()")
        await tab.eval(TAILS)
        rows = "[...document.querySelectorAll('#prefixes li')].map(li => li.dataset.key).join()"
        assert await tab.eval(rows) == "system,a,b"
        assert await tab.eval("document.querySelector('#prefixes .who').textContent") == "preble explain newest"
        assert await tab.eval("document.getElementById('prefix-note').textContent") == "fills up: 30 of 180 s"
        await tab.eval("document.getElementById('tails').click()")
        assert await tab.eval(rows) == "system,a,a2,a3,b"


SHOTS = {
    "light": (8, {"width": 1280, "height": 860}),
    "dark": (8, {"width": 1280, "height": 860, "dark": True}),
    "phone": (8, {"width": 390, "height": 844}),
    "large": (400, {"width": 1280, "height": 860}),
    "large-phone": (400, {"width": 390, "height": 844, "dark": True}),
}
IN_DOCS = ("light", "large")


@pytest.mark.clients
@pytest.mark.parametrize("name", SHOTS)
async def test_the_page_fits_every_window_and_fleet(name: str, tmp_path: Path) -> None:
    """With PREBLE_REWRITE_PICTURES=folder it keeps the pictures, and those of the documentation in their place."""
    count, window = SHOTS[name]
    keep, day = os.environ.get("PREBLE_REWRITE_PICTURES"), Day()
    before, during = ((700, 350) if count < 20 else (1200, 300)) if keep else (0, 40)
    async with drawn_fleet(count) as gateway:
        await work(gateway, day, before, at_once=200)
        async with watching(gateway.url, tmp_path, **window, scale=2 if keep else 1) as tab:
            await work(gateway, day, during, at_once=30)
            await tab.until("document.querySelectorAll('#decisions li').length >= 10")
            items = await tab.eval("document.querySelectorAll('#fleet tbody tr, .tiles button').length")
            assert items == (count if count <= 24 else count + 1)
            wide = await tab.eval("[document.documentElement.scrollWidth, innerWidth]")
            assert wide[0] <= wide[1], "nothing sticks out to the right"
            shot = tmp_path / f"{name}.png"
            await tab.screenshot(shot)
            assert shot.stat().st_size > 10_000
            if keep:
                await asyncio.to_thread(kept, shot, Path(keep), name)


def kept(shot: Path, folder: Path, name: str) -> None:
    from PIL import Image

    Image.open(shot).save(folder / f"{name}.png")
    if name in IN_DOCS:
        PICTURES.mkdir(exist_ok=True)
        Image.open(shot).convert("RGB").save(PICTURES / f"{name}.webp", quality=82, method=6)
