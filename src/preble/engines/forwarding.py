"""Requests of clients that are passed on as they come: any method, bodies in pieces, answers of any kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import aiohttp

from preble.errors import EngineGone, EngineTimeout
from preble.web.messages import HeaderList

if TYPE_CHECKING:
    from preble.engines.http import HttpClient


class Forwarded:
    """An answer that is being received. Its body can be read once."""

    def __init__(self, client: HttpClient, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers: HeaderList = [(name.lower(), value) for name, value in response.raw_headers]
        self._client = client
        self._content = response.content

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes.

        Raises: EngineGone: the connection broke before the end. EngineTimeout: nothing came for too long.
        """
        while True:
            try:
                async with asyncio.timeout(self._client.timeouts.idle_s):
                    chunk = await self._content.readany()
            except TimeoutError as error:
                raise self._client.error(EngineTimeout, "sent nothing for too long") from error
            except (aiohttp.ClientError, OSError) as error:
                raise self._client.error(EngineGone, f"broke off in the middle of its answer ({error})") from error
            if not chunk:
                return
            yield chunk
