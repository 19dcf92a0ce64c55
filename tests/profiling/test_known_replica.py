"""What is fitted to an emulated replica on a virtual clock is the profile by which that replica goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from preble.core.costs.model import CostModel, CostProfile
from preble.core.types import ReplicaId, ReplicaSpec, Tier, pack_tokens
from preble.emulator.config import EmulatorConfig
from preble.emulator.engine import EmulatedEngine, Prompt
from preble.engines import EngineInfo
from preble.lab.profiling import Fit, fit_profile
from preble.lab.profiling.measure import Measuring
from preble.profiles import load_profile
from support.virtual_time import VirtualTimeLoop

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
        yield SimpleNamespace(status=200, chunks=lambda: self._events(asked["prompt"], asked["max_tokens"]))

    async def _events(self, prompt: list[int], output_tokens: int) -> AsyncIterator[bytes]:
        with self.emulated.generate([Prompt(pack_tokens(prompt), output_tokens)]) as generation:
            async for pieces in generation.pieces():
                for piece in pieces:
                    yield event({"choices": [{"text": piece.text}]})
                    finished = piece.finished
        assert finished is not None
        details = {"cached_tokens": finished.num_cached_tokens}
        yield event({"choices": [], "usage": {"completion_tokens": output_tokens, "prompt_tokens_details": details}})
        yield b"data: [DONE]\n\n"


def event(data: dict[str, object]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def fitted(
    profile: CostProfile, max_running: int = 256, tier: Tier | None = None, **settings: Any
) -> tuple[Fit, tuple[str, ...]]:
    """The fit, and the notes of the measurement."""

    async def measured() -> tuple[Fit, tuple[str, ...]]:
        engine = InProcess(profile, max_running, **settings)
        computing = asyncio.create_task(engine.emulated.run())
        measuring = Measuring(engine, machine="none", seed=7, tier=tier)  # type: ignore[arg-type]
        await measuring.prepare()
        measurements = await measuring.run()
        computing.cancel()
        return fit_profile(measurements, name="fitted", source="a test"), measurements.notes

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(measured())


@pytest.mark.parametrize("overhead_s", [0.0, 0.002, 0.02])
def test_what_a_request_costs_beside_its_tokens_is_found(overhead_s: float) -> None:
    fit, notes = fitted(replace(load_profile("tiny-cpu"), request_overhead_s=overhead_s))
    assert notes == ()
    assert fit.profile.request_overhead_s == pytest.approx(overhead_s, rel=0.05, abs=2e-4)


def test_what_a_request_costs_is_in_no_other_time() -> None:
    """Of a request alone it cannot be separated from its way, and is subtracted with it."""
    free, dear = (fitted(replace(load_profile("tiny-cpu"), request_overhead_s=cost))[0] for cost in (0.0, 0.02))
    assert dear.overhead_s == pytest.approx(free.overhead_s + 0.02, rel=0.05)
    without, with_it = CostModel(free.profile), CostModel(dear.profile)
    for new, cached in product((16, 150, 1000, 2500), (0, 400)):
        assert with_it.prefill_s(new, cached) == pytest.approx(without.prefill_s(new, cached), rel=0.05)
    assert with_it.iteration_s((), 8, 8000) == pytest.approx(without.iteration_s((), 8, 8000), rel=0.05)


def test_a_replica_that_admits_nobody_beside_a_batch_is_reported() -> None:
    fit, notes = fitted(load_profile("tiny-cpu"), max_running=1)
    assert fit.profile.request_overhead_s == 0.0
    assert "no request could be timed beside a decoding batch, so what each costs counts as nothing" in notes


def test_what_loading_from_the_hosts_memory_takes_is_found() -> None:
    profile = replace(load_profile("tiny-cpu"), host_load_s_per_token=1e-5)
    fit, notes = fitted(profile, tier=Tier.HOST, host_tokens=4 * KV_TOKENS)
    assert notes == ()
    assert fit.profile.host_load_s_per_token == pytest.approx(1e-5, rel=0.05)
    assert fit.profile.store_load_s_per_token is None


def test_what_loading_from_a_store_takes_is_found(tmp_path: Path) -> None:
    profile = replace(load_profile("tiny-cpu"), store_load_s_per_token=3e-5)
    fit, _ = fitted(profile, tier=Tier.STORE, store=str(tmp_path))
    assert fit.profile.store_load_s_per_token == pytest.approx(3e-5, rel=0.05)
    assert fit.profile.host_load_s_per_token is None


def test_a_tier_from_which_nothing_is_loaded_is_reported() -> None:
    fit, notes = fitted(load_profile("tiny-cpu"), tier=Tier.HOST)
    assert fit.profile.host_load_s_per_token is None
    assert any("nothing was loaded from the tier" in note for note in notes)
