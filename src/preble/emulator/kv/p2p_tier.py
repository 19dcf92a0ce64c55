"""KV copied from another emulated replica, as vLLM's p2p tier does it, with the traps that vLLM 0.32 has.

The other one is asked over HTTP which blocks it has; nothing else moves. Two prompts under one id end the engine. After
a connection that failed nothing is copied any more, and each request that asks for it waits. Unlike vLLM's, a copied
prompt of whole blocks has its last block computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from preble.core.replica.prefix_cache import hash_blocks
from preble.core.types import PackedTokens, ReplicaId
from preble.engines.http import HttpClient
from preble.errors import EngineError

HANDSHAKE_S = 30.0
"""How long a request waits in vain, as vLLM comes (`VLLM_P2P_HANDSHAKE_TIMEOUT_S`)."""
BLOCKS_PATH = "/emulated_kv_blocks"


class KvSource(msgspec.Struct):
    """Where a request's KV is."""

    kv_request_id: str
    remote_host: str
    remote_port: int


class KvTransfer(msgspec.Struct):
    """`kv_transfer_params` of a body: of the p2p tier, and of NIXL."""

    remote_kv_source: KvSource | None = None
    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_request_id: str = ""
    remote_host: str = ""
    remote_port: int = 0
    remote_num_tokens: int = 0
    remote_prefill_cached_tokens: int = 0


class SharedId(Exception):
    """Two prompts have come under one `kv_request_id`."""


class PeerTier:
    """Copies from others. `is_deaf`: a connection has failed."""

    def __init__(self) -> None:
        self.is_deaf = False
        self._in_use: dict[str, PackedTokens] = {}

    @contextmanager
    def using(self, source: KvSource, prompts: Sequence[PackedTokens]) -> Iterator[None]:
        """Raises: SharedId: another prompt has this id, or there are several."""
        name = source.kv_request_id
        if len({*prompts, self._in_use.setdefault(name, prompts[0])}) > 1:
            raise SharedId(f"symmetric fetch for {name} has keys but no probes")
        try:
            yield
        finally:
            self._in_use.pop(name, None)

    async def blocks(self, source: KvSource) -> frozenset[int]:
        """Return the blocks that the source has; none where it cannot be reached."""
        if self.is_deaf:
            await asyncio.sleep(HANDSHAKE_S)
            return frozenset()
        http = HttpClient(f"http://{source.remote_host}:{source.remote_port}", ReplicaId("peer"))
        try:
            return frozenset((await http.ask(BLOCKS_PATH)).decode(list[int]))
        except EngineError:
            self.is_deaf = True
            return frozenset()
        finally:
            await http.close()


def num_cached_blocks(prompt: PackedTokens, namespace: str, block_size: int, blocks: frozenset[int]) -> int:
    """Return how many of a prompt's first blocks are among these."""
    hashes = hash_blocks(prompt, block_size, namespace=namespace)
    return next((i for i, block in enumerate(hashes) if block not in blocks), len(hashes))
