"""`/ui`: the page, which anybody may load; `/ui/events` and `/ui/picture`, what it shows, for admins."""

from __future__ import annotations

import asyncio
import base64
import re
from contextlib import suppress
from hashlib import sha256
from importlib.resources import files

from preble.errors import Overloaded
from preble.gateway.http.page_client import PageClient
from preble.gateway.pages.front import Front
from preble.prompts.endpoints import JSON_TYPE, HeaderList
from preble.serving import SchedulerAway

UI = "/ui"
UI_EVENTS = "/ui/events"
UI_PICTURE = "/ui/picture"
EVERY_S = 1.0
_MAX_WATCHING = 32
_EVENT_STREAM = ((b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"))


class LivePage:
    """Answers the page, and streams a picture of the gateway every second to those who watch.

    All of them get the same picture. It is taken only while somebody watches.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._taking = asyncio.Lock()
        self._html = files(__package__).joinpath("live.html").read_bytes()
        self._headers = _headers(self._html.decode())
        self._num_watching = 0
        self._taken_at = 0.0
        self._taken = b""

    async def page(self, client: PageClient) -> None:
        """Answer with the page. It has no data in it."""
        await client.reply(200, self._headers, self._html)

    async def picture(self, client: PageClient) -> None:
        """Answer with one picture. Raises: SchedulerAway."""
        await client.reply(200, [JSON_TYPE], await self._picture(client))

    async def watch(self, client: PageClient) -> None:
        """Stream pictures until the client goes, its key ends, the gateway stops, or no picture can be taken.

        Raises: Overloaded, ClientGone.
        """
        if self._num_watching >= _MAX_WATCHING:
            raise Overloaded(f"{_MAX_WATCHING} live pages are open, which is the limit; close one", retry_after_s=60.0)
        self._num_watching += 1
        try:
            with client.unless_gone():
                client.begin(200, list(_EVENT_STREAM))
                with suppress(SchedulerAway):
                    while self._goes_on(client):
                        await client.write(b"data: " + await self._picture(client) + b"\n\n")
                        await asyncio.sleep(EVERY_S)
            client.end()
        finally:
            self._num_watching -= 1

    def _goes_on(self, client: PageClient) -> bool:
        caller = self._front.keys.caller(client.headers)
        return not self._front.is_draining and caller is not None and caller.is_admin

    async def _picture(self, client: PageClient) -> bytes:
        """Return a picture, at most half a second old. Raises: SchedulerAway."""
        async with self._taking:
            now = asyncio.get_running_loop().time()
            if now - self._taken_at > EVERY_S / 2:
                self._taken = await self._front.take_picture(client)
                self._taken_at = now
            return self._taken


def _headers(html: str) -> HeaderList:
    """Return headers that let the page run its own script and style, ask this server, and nothing else."""
    [style], [script] = (re.findall(f"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL) for tag in ("style", "script"))
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-security-policy", policy.encode()),
        (b"referrer-policy", b"no-referrer"),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"no-cache"),
    ]


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"
