"""What pages need of the application that they belong to."""

from __future__ import annotations

from typing import Protocol

from preble.gateway.http.access import KeyRing
from preble.gateway.http.page_client import PageClient


class Front(Protocol):
    """The application whose pages these are. `is_draining`: it is about to stop. `keys`: change with a reload."""

    is_draining: bool
    keys: KeyRing

    async def read_body(self, client: PageClient, most_bytes: int) -> bytes:
        """Return a page's body. Raises: BodyTooLarge, BodyTooSlow, Overloaded, ClientGone."""

    async def take_picture(self, client: PageClient) -> bytes:
        """Return what the live page shows, for an admin. Raises: SchedulerAway."""
