"""Prompts that an emulated replica has computed and keeps for another one to fetch, as vLLM with NIXL does.

It keeps them for its lease, whoever comes or not. What is fetched later may be another prompt's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import msgspec

from preble.core.replica.scheduler import Lent, LocalScheduler
from preble.core.types import Request

KEPT_PATH = "/emulated_kept_kv"
MOST_REMEMBERED = 1000
"""Prompts that were fetched, or whose leases have ended; the oldest goes first."""


class KeptName(msgspec.Struct):
    """Which prompt is fetched."""

    name: str


class KeptKv(msgspec.Struct):
    """What comes. `is_other`: some of it is another prompt's by now."""

    blocks: list[int]
    is_other: bool


@dataclass(frozen=True, slots=True)
class _Lease:
    lent: Lent
    ends: asyncio.TimerHandle


class KeptPrompts:
    """What a replica keeps for others to fetch."""

    def __init__(self, scheduler: LocalScheduler, lease_s: float) -> None:
        self._scheduler = scheduler
        self._lease_s = lease_s
        self._kept: dict[str, _Lease] = {}
        self._over: dict[str, frozenset[int]] = {}

    def keep(self, request: Request, cached_tokens: int, address: tuple[str, int]) -> dict[str, Any]:
        """Keep a prompt that has been computed, and return the `kv_transfer_params` of the answer."""
        name = uuid4().hex
        ends = asyncio.get_running_loop().call_later(self._lease_s, self._let_go, name)
        self._kept[name] = _Lease(self._scheduler.lend(request), ends)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(len(self._kept[name].lent.blocks)))],
            "remote_engine_id": "emulator",
            "remote_request_id": name,
            "remote_host": address[0],
            "remote_port": address[1],
            "remote_num_tokens": request.num_prompt_tokens,
            "remote_prefill_cached_tokens": cached_tokens,
        }

    def take(self, name: str) -> KeptKv:
        """Return what was kept, and keep it no longer."""
        self._let_go(name)
        hashes = self._over.get(name, frozenset())
        return KeptKv(sorted(hashes), is_other=not hashes <= self._scheduler.cached_hashes())

    def _let_go(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        if kept is None:
            return
        kept.ends.cancel()
        self._scheduler.take_back(kept.lent)
        self._over[name] = kept.lent.hashes
        if len(self._over) > MOST_REMEMBERED:
            del self._over[next(iter(self._over))]

    def close(self) -> None:
        """Keep nothing."""
        for name in list(self._kept):
            self._let_go(name)


def address_in(headers: Mapping[bytes, bytes]) -> tuple[str, int]:
    """Return where a request has come to: there others fetch."""
    host, _, port = headers[b"host"].decode("latin-1").rpartition(":")
    return host, int(port)
