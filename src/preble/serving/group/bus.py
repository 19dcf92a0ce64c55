"""What carries the packets of a group of gateways: NATS, or what the platform of a carrier has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Bus(Protocol):
    """Carries packets to all other gateways of the group, at most once, each sender's in order.

    It connects in the background, and reconnects whenever the connection is lost.
    """

    @property
    def is_connected(self) -> bool:
        """Whether packets get through now."""

    async def publish(self, packet: bytes) -> None:
        """Send to all others. Drops the packet if it cannot be sent now; raises nothing."""

    async def close(self) -> None:
        """Send what is left, and stop."""


NewBus = Callable[[str, Callable[[bytes], None], Callable[[bool], None]], Bus]
"""Makes a bus from this gateway's name, what to call with each packet of another gateway, and what to call with
`is_connected` whenever that changes. Raises: ConfigError."""
