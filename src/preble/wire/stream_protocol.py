"""What a connection must understand of its transport."""

from __future__ import annotations

import asyncio


class StreamProtocol:
    """As `asyncio.Protocol`, from which compiled classes cannot derive."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """The connection is there."""

    def data_received(self, data: bytes) -> None:
        """Some bytes have come."""

    def eof_received(self) -> bool | None:
        """The other end sends no more. Return whether the connection stays open."""
        return None

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is over."""

    def pause_writing(self) -> None:
        """The other end reads slowly."""

    def resume_writing(self) -> None:
        """The other end has read what there was."""
