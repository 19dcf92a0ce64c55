"""A real headless Chromium, driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from support.servers import require_server
from support.waiting import PATIENCE_S, eventually


class Tab:
    """One page in the browser. `errors`: what it has logged as an error, and uncaught exceptions."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        self.requested: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(said["params"]["exceptionDetails"])[:1000])
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.errors.append(said["params"]["entry"]["text"])
            elif said["method"] == "Network.requestWillBeSent":
                self.requested.append(said["params"]["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._numbers)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(PATIENCE_S):
            said = await future
        assert "error" not in said, said
        return dict(said["result"])

    async def eval(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, script: str, what: str = "") -> None:
        """Return when an expression is true in the page."""

        async def is_so() -> bool:
            return bool(await self.eval(script))

        await eventually(is_so, what or script)

    async def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False, scale: int = 1) -> None:
        """Load a page in a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Save what is seen, or the whole page."""
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(found["data"]))


async def page_of(http: aiohttp.ClientSession) -> str:
    """The address of the browser's first page. It listens a little before it has one."""
    pages: list[str] = []

    async def has_one() -> bool:
        async with http.get("/json/list") as answer:
            pages.extend(page["webSocketDebuggerUrl"] for page in await answer.json() if page["type"] == "page")
        return bool(pages)

    await eventually(has_one, "Chromium has a page")
    return pages[0]


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Tab]:
    """A tab of a new Chromium that keeps its files in `folder`."""
    program = require_server("chromium", "chromium")
    flags = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--no-first-run",
    )
    running = await asyncio.create_subprocess_exec(
        program,
        *flags,
        "--remote-debugging-port=0",
        f"--user-data-dir={folder / 'chromium'}",
        "about:blank",
        stderr=asyncio.subprocess.DEVNULL,
    )
    port_file = folder / "chromium" / "DevToolsActivePort"
    try:
        await eventually(lambda: port_file.exists() and len(port_file.read_text().split()) > 1, "Chromium listens")
        port = port_file.read_text().split()[0]
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
            http.ws_connect(await page_of(http), max_msg_size=0) as socket,
        ):
            tab = Tab(socket)
            listening = asyncio.create_task(tab.listen())
            for domain in ("Page", "Runtime", "Log", "Network"):
                await tab.call(f"{domain}.enable")
            try:
                yield tab
            finally:
                listening.cancel()
    finally:
        running.terminate()
        await running.wait()
