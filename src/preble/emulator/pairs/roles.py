"""What an emulated replica of a fixed role says of itself, as an SGLang server of that role does."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from preble.core.types import Role
from preble.emulator.config import EmulatorConfig
from preble.emulator.engine import EmulatedEngine
from preble.emulator.kv.events import KvEventPublisher
from preble.emulator.pairs.decoding import Decode
from preble.emulator.pairs.rooms import ROOMS_PATH, PairFailed, Prefill, Wanted
from preble.emulator.web import EmulatorRequest

OWNER = "sglang"
VERSION = "0.5.23"
"""Of the SGLang whose ways these are."""
BACKEND = "emulated"
"""What it says of how KV is sent."""


class RolePages:
    """The questions that only an SGLang server answers, and the one with which emulated ones meet."""

    def __init__(
        self,
        config: EmulatorConfig,
        side: Prefill | Decode,
        engines: Sequence[EmulatedEngine],
        publishers: Sequence[KvEventPublisher],
        bootstrap_port: int,
    ) -> None:
        self._config = config
        self._side = side
        self._engines = engines
        self._publishers = publishers
        self._bootstrap_port = bootstrap_port

    @property
    def routes(self) -> Mapping[tuple[str, str], Callable[[EmulatorRequest], Coroutine[Any, Any, None]]]:
        return {
            ("GET", "/server_info"): self._server_info,
            ("GET", "/model_info"): self._model_info,
            ("GET", "/v1/loads"): self._loads,
            ("POST", "/abort_request"): self._abort_request,
            ("POST", ROOMS_PATH): self._rooms,
        }

    async def _server_info(self, exchange: EmulatorRequest) -> None:
        info = {
            "version": VERSION,
            "page_size": self._config.block_size,
            "max_total_num_tokens": sum(engine.num_blocks for engine in self._engines) * self._config.block_size,
            "enable_cache_report": True,
            "disable_radix_cache": self._config.role is Role.DECODE and not self._config.decode_caches,
            "disaggregation_mode": self._config.role,
            "disaggregation_bootstrap_port": self._bootstrap_port,
            "disaggregation_transfer_backend": "mooncake" if self._config.mooncake else BACKEND,
            "disaggregation_decode_enable_radix_cache": self._config.decode_caches,
            "kv_events": self._kv_events(),
        }
        await exchange.json(info)

    def _kv_events(self) -> dict[str, Any] | None:
        if not self._publishers:
            return None
        source = self._publishers[0].source()
        return {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": _port(source["endpoint"]),
            "replay_endpoint_port_base": _port(source["replay_endpoint"]),
            "topic": source["topic"],
            "dp_size": len(self._engines),
        }

    async def _model_info(self, exchange: EmulatorRequest) -> None:
        await exchange.json({"model_path": self._config.model, "disaggregation_mode": self._config.role})

    async def _loads(self, exchange: EmulatorRequest) -> None:
        await exchange.json({"version": VERSION})

    async def _abort_request(self, exchange: EmulatorRequest) -> None:
        """Do nothing: it is seen at once that a client has left."""
        await exchange.read()
        await exchange.whole(b"", b"text/plain")

    async def _rooms(self, exchange: EmulatorRequest) -> None:
        wanted = msgspec.json.decode(await exchange.read(), type=Wanted)
        try:
            if not isinstance(self._side, Prefill):
                raise PairFailed(400, "this replica computes for nobody")
            with exchange.unless_gone():
                sent = await self._side.wanted(wanted)
        except PairFailed as failure:
            await exchange.json(failure.fields, failure.status)
        else:
            await exchange.json(sent)


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])
