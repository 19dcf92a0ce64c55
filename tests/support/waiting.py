"""Waiting for a condition, never for a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

PATIENCE_S = 120.0
"""More than a slow or busy machine takes for anything that is waited for here: only a broken program gets there."""


async def eventually(
    condition: Callable[[], bool | Awaitable[bool]],
    what: str = "what is waited for",
    timeout_s: float = PATIENCE_S,
) -> None:
    """Return as soon as `condition` is true. Raises: AssertionError: it is not within `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        result = condition()
        if await result if isinstance(result, Awaitable) else result:
            return
        assert asyncio.get_running_loop().time() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.01)
