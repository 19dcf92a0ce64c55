"""Two replicas that answer one request together: one computes the prompt, the other decodes the answer.

Whoever carries the request sees one engine, which answers as the one that decodes.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Mapping

from preble.core.types import LONGEST_KV_LEASE_S, ReplicaId
from preble.core.types.life import TransferFailed, Transferred
from preble.engines.adapter import Engine, EngineInfo
from preble.errors import EngineError, EngineGone
from preble.web.client.pool import Ongoing, Receiver


class PairedEngine(Engine):
    """The engine that decodes, for one request whose prompt `prefill` computes. An adapter defines `begin`."""

    def __init__(self, decode: Engine, prefill: Engine) -> None:
        super().__init__(decode.http)
        self.decode, self.prefill = decode, prefill
        self.adapters, self.model_path, self.rank = decode.adapters, decode.model_path, decode.rank
        self.takes_cache_salt, self.takes_ids = decode.takes_cache_salt, decode.takes_ids
        self.report: Callable[[Transferred | TransferFailed], None] | None = None
        """Hears what becomes of the transfer. Set by who follows the placement."""
        self.kept_until = 0.0
        """Until when, by the event loop's clock, `prefill` keeps the prompt if `decode` never fetches it."""
        self._on_loss: Callable[[EngineError], None] | None = None
        self._loss: EngineError | None = None

    @property
    def replica_id(self) -> ReplicaId:
        return self.decode.replica_id

    @property
    def adapter(self) -> str:
        return self.decode.adapter

    def lost_source(self, answer: bytes) -> bool:
        """Return whether an error of the one that decodes says that it could not get the prompt of the other one."""
        return False

    def lose_source(self, reason: str | None) -> None:
        """The source has left the rotation. Its leg fails, soon; its machine may be silent, and break off nothing."""
        text = f"was taken out of the rotation: {reason}"
        self._loss = self.prefill.http.error(EngineGone, text, is_silent=True)
        asyncio.get_running_loop().call_soon(self._tell_loss)

    def on_loss(self, fail: Callable[[EngineError], None] | None) -> None:
        """Call this if the source leaves the rotation, soon if it has left; None: its leg is over."""
        self._on_loss = fail
        if fail is not None and self._loss is not None:
            asyncio.get_running_loop().call_soon(self._tell_loss)

    def _tell_loss(self) -> None:
        if self._on_loss is not None and self._loss is not None:
            self._on_loss(self._loss)

    def kept_s(self) -> float:
        """Return for how long `prefill` still keeps the prompt for `decode`, which will not fetch it any more."""
        left_s = self.kept_until - asyncio.get_running_loop().time()
        return min(max(left_s, 0.0), LONGEST_KV_LEASE_S)  # by the replica's word

    def tell(self, fact: Transferred | TransferFailed) -> None:
        """Report what has become of the transfer."""
        if self.report is not None:
            self.report(fact)

    @abstractmethod
    def begin(self, path: str, body: bytes, headers: Mapping[str, str], receiver: Receiver) -> Ongoing:
        """Send what each of the two has to do; `receiver` hears of the answer of the one that decodes."""

    async def probe(self) -> EngineInfo:
        return await self.decode.probe()

    async def check_ready(self) -> None:
        await self.prefill.check_ready()
        await self.decode.check_ready()

    async def tokenize(self, body: bytes) -> list[int]:
        return await self.decode.tokenize(body)

    async def close(self) -> None:
        """Close nothing: the connections are those of the two."""
