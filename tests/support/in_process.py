"""An emulated replica without a network, for measurements on a virtual clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec

from preble.core.costs.model import CostModel, CostProfile
from preble.core.types import ReplicaId, ReplicaSpec, pack_tokens
from preble.emulator.config import EmulatorConfig
from preble.emulator.engine import EmulatedEngine
from preble.emulator.generation import Prompt
from preble.emulator.kv.p2p_tier import KvTransfer
from preble.engines import EngineInfo

KV_TOKENS, LONGEST = 16_384, 3000
WAY_S = 0.004
"""To the replica; the way back takes no time."""


class InProcess:
    """The client of an emulated replica without a network: a request takes `WAY_S` to it."""

    replica_id, url = ReplicaId("emulated"), "none"

    def __init__(self, profile: CostProfile, max_running: int, **settings: Any) -> None:
        config = EmulatorConfig(
            profile=profile.name, kv_tokens=KV_TOKENS, max_model_len=LONGEST, max_running=max_running, **settings
        )
        tokenizer = SimpleNamespace(output_ids=range(5000, 5037), output_pieces=["x"] * 37)
        self.emulated = EmulatedEngine(config, CostModel(profile), tokenizer, None)  # type: ignore[arg-type]

    async def probe(self) -> SimpleNamespace:
        spec = ReplicaSpec(self.replica_id, kv_capacity_tokens=KV_TOKENS)
        return SimpleNamespace(engine=self, info=EngineInfo("emulator", ("m",), spec, LONGEST))

    @asynccontextmanager
    async def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[SimpleNamespace]:
        asked = json.loads(body)
        await asyncio.sleep(WAY_S)
        prompts = [Prompt(pack_tokens(asked["prompt"]), asked["max_tokens"])]
        source = msgspec.convert(asked.get("kv_transfer_params", {}), KvTransfer).remote_kv_source
        async with self.emulated.copying(source, prompts) as given:
            yield SimpleNamespace(status=200, chunks=lambda: self._events(given, asked["max_tokens"]))

    async def _events(self, prompts: Sequence[Prompt], output_tokens: int) -> AsyncIterator[bytes]:
        with self.emulated.generate(prompts) as generation:
            async for pieces in generation.pieces():
                for piece in pieces:
                    yield _event({"choices": [{"text": piece.text}]})
                    finished = piece.finished
        assert finished is not None
        details = {"cached_tokens": finished.num_cached_tokens}
        yield _event({"choices": [], "usage": {"completion_tokens": output_tokens, "prompt_tokens_details": details}})
        yield b"data: [DONE]\n\n"


def _event(data: dict[str, object]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()
