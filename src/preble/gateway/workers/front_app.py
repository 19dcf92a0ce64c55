"""The application of a front-end process: it answers placed requests, and has the scheduler process answer the rest."""

from __future__ import annotations

from typing import cast

from preble.config import GatewayConfig
from preble.gateway.app import App
from preble.gateway.http.access import KeyRing
from preble.gateway.http.page_client import PageClient
from preble.gateway.pages.live import UI, UI_EVENTS, UI_PICTURE
from preble.gateway.pages.status import HEALTH, READY, VERSION
from preble.prompts.endpoints import endpoint_of
from preble.serving import FrontEnd, SchedulerAway, Serving

_LARGEST_BYTES = 64 * 1024
"""The longest body of a request that is passed on: no page takes more."""
_OWN = frozenset({*HEALTH, VERSION, UI, UI_EVENTS})


class FrontApp(App):
    """Answers every request of a front-end process. `share`: how many such processes share the memory for bodies."""

    def __init__(self, config: GatewayConfig, front_end: FrontEnd, keys: KeyRing, share: int) -> None:
        self._front_end = front_end
        self.num_processes = share
        # Only pages use what `Serving` adds to `Intake`, and those are passed on.
        super().__init__(config, cast(Serving, front_end), keys)

    async def _route(self, method: str, client: PageClient) -> None:
        if client.path in _OWN or endpoint_of(client.path) is not None:
            await super()._route(method, client)
        elif await self._is_let_in(client):
            try:
                await self._pass_on(method, client)
            except SchedulerAway:
                if client.path not in READY:
                    raise
                await self._ready_alone(client)

    async def _pass_on(self, method: str, client: PageClient) -> None:
        """Raises: SchedulerAway."""
        body = await self.read_body(client, _LARGEST_BYTES) if method == "POST" else b""
        answer = await self._front_end.page(method, client.path, client.head.query, client.headers.items(), body)
        client.browsers = []  # the scheduler process has put them in
        await client.reply(answer.status, list(answer.headers), answer.body)

    async def take_picture(self, client: PageClient) -> bytes:
        """Raises: SchedulerAway: or it refuses this client."""
        answer = await self._front_end.page("GET", UI_PICTURE, b"", client.headers.items(), b"")
        if answer.status != 200:
            raise SchedulerAway(f"the scheduler process answers {UI_PICTURE} with status {answer.status}")
        return answer.body

    async def _ready_alone(self, client: PageClient) -> None:
        """Answer whether this process is ready while the scheduler process is away: it then places by load."""
        count = len(self._front_end.replicas)
        status = "draining" if self.is_draining else "ready" if count else "no replica is up"
        page = {"status": status, "replicas": count, "scheduler": "away"}
        await client.reply_json(200 if status == "ready" else 503, page)

    def _count(self, client: PageClient) -> None:
        """Count a request, unless the scheduler process answers it and so counts it."""
        if client.path in _OWN or endpoint_of(client.path) is not None or not self._front_end.is_led:
            super()._count(client)
