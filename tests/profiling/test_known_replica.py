"""What is fitted to an emulated replica on a virtual clock is the profile by which that replica goes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from preble.core.costs.model import CostModel, CostProfile
from preble.core.types import Tier
from preble.lab.profiling import Fit, fit_profile
from preble.lab.profiling.measure import Measuring
from preble.profiles import load_profile
from support.in_process import KV_TOKENS, InProcess
from support.virtual_time import VirtualTimeLoop


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
