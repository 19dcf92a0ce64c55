"""The pure fit: from times that a known profile produces, with noise and disturbances, back to that profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble.core.costs.model import CostModel, CostProfile
from preble.errors import ConfigError
from preble.lab.profiling import AdmissionTimes, DecodeTimes, Fit, Measurements, PrefillTimes, fit_profile, make_plan
from preble.lab.profiling.fit import prefill_points
from preble.lab.profiling.least_deviation import isotonic
from preble.lab.profiling.measurements import NOISY_SPREAD, spread
from preble.lab.profiling.plan import ADMITTED_TOKENS, BURSTS
from preble.lab.profiling.request_overhead import Burst, extra_s
from preble.profiles import load_profile

OVERHEAD_S = 0.003
Noise = Callable[[Random], float]


def gaussian(sigma: float) -> Noise:
    return lambda rng: max(rng.gauss(1.0, sigma), 0.1)


def often_disturbed(rng: Random) -> float:
    """3 % of noise, and one time in ten something else held the machine up."""
    return gaussian(0.03)(rng) * (rng.uniform(2.0, 5.0) if rng.random() < 0.1 else 1.0)


def measured(profile: CostProfile, noise: Noise = lambda rng: 1.0, seed: int = 0) -> Measurements:
    """What a replica that behaves exactly as `profile` would show, but for noise."""
    model, rng = CostModel(profile), Random(seed)
    plan = make_plan(16_000, profile.kv_capacity_tokens)

    def prefill(new: int, cached: int) -> PrefillTimes:
        def time() -> float:
            return OVERHEAD_S + model.prefill_s(new, cached) * noise(rng)

        seconds = tuple(time() for _ in range(plan.repetitions))
        if spread(seconds) > NOISY_SPREAD:  # as `Measuring` does
            seconds += tuple(time() for _ in range(plan.repetitions))
        return PrefillTimes(new, cached, seconds)

    def decode(batch: int, context: int) -> DecodeTimes:
        step_s = model.iteration_s((), batch, batch * context)
        return DecodeTimes(batch, batch * context, tuple(step_s * noise(rng) for _ in range(8)))

    def admission(batch: int, tokens: int) -> AdmissionTimes:
        beside = batch, batch * tokens // 2
        added_s = model.iteration_s([(ADMITTED_TOKENS, 0)], *beside) - model.iteration_s((), *beside)
        seconds = tuple((added_s + profile.request_overhead_s) * noise(rng) for _ in range(BURSTS))
        return AdmissionTimes(*beside, ADMITTED_TOKENS, seconds)

    return Measurements(
        date="2026-01-01",
        machine="none",
        engine="a formula",
        model="m",
        seed=seed,
        kv_capacity_tokens=profile.kv_capacity_tokens,
        prefill=tuple(prefill(new, cached) for cached, new in [*((0, n) for n in plan.lengths), *plan.behind]),
        decode=tuple(decode(batch, context) for batch, context in plan.decode),
        admissions=tuple(admission(batch, tokens) for batch, tokens in plan.admitting),
    )


def fitted(profile: CostProfile, noise: Noise = lambda rng: 1.0, seed: int = 0) -> Fit:
    return fit_profile(measured(profile, noise, seed), name="fitted", source="a test")


def worst_error(fit: Fit, truth: CostProfile) -> float:
    """Of the prefills and decode iterations that matter to a scheduler, between the measured points too."""
    got, want = CostModel(fit.profile), CostModel(truth)
    chunks = product((300, 900, 2500, 5000), (0, 1500, 9000))
    steps = [(batch, batch * context) for batch, context in product((1, 3, 12, 30), (100, 2000))]
    pairs = [(got.prefill_s(*chunk), want.prefill_s(*chunk)) for chunk in chunks]
    pairs += [(got.iteration_s((), *step), want.iteration_s((), *step)) for step in steps]
    return max(abs(a - b) / b for a, b in pairs)


PROFILES = ("a6000-mistral-7b", "a100-mistral-7b", "h100x2-llama-3-70b", "tiny-cpu")


@pytest.mark.parametrize("name", PROFILES)
def test_exact_times_give_the_profile_back(name: str) -> None:
    truth = load_profile(name)
    assert worst_error(fitted(truth), truth) < 0.12


@pytest.mark.parametrize("name", PROFILES)
def test_noise_of_five_percent_stays_small(name: str) -> None:
    truth = load_profile(name)
    assert worst_error(fitted(truth, gaussian(0.05)), truth) < 0.15


@pytest.mark.parametrize("seed", range(3))
def test_one_disturbed_time_in_ten_does_not_bend_the_fit(seed: int) -> None:
    truth = load_profile("a100-mistral-7b")
    assert worst_error(fitted(truth, often_disturbed, seed), truth) < 0.2


def test_the_way_to_the_replica_is_no_part_of_the_profile() -> None:
    assert fitted(load_profile("a6000-mistral-7b")).overhead_s == pytest.approx(OVERHEAD_S, rel=0.1)


def test_times_taken_without_a_network_are_taken_as_they_are() -> None:
    direct = msgspec.structs.replace(measured(load_profile("a6000-mistral-7b")), over_http=False)
    assert fit_profile(direct, name="x", source="y").overhead_s == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_a_requests_overhead_is_found_though_one_burst_in_ten_was_disturbed(seed: int) -> None:
    truth = replace(load_profile("tiny-cpu"), request_overhead_s=0.005)
    assert fitted(truth).profile.request_overhead_s == pytest.approx(0.005, rel=0.02)
    assert fitted(truth, often_disturbed, seed).profile.request_overhead_s == pytest.approx(0.005, rel=0.1)


def test_a_requests_overhead_is_never_negative_and_nothing_where_it_was_not_measured() -> None:
    times = measured(replace(load_profile("tiny-cpu"), request_overhead_s=0.005))
    quicker = tuple(msgspec.structs.replace(one, seconds=(-0.1, -0.2)) for one in times.admissions)
    for admissions in (quicker, ()):
        other = msgspec.structs.replace(times, admissions=admissions)
        assert fit_profile(other, name="x", source="y").profile.request_overhead_s == 0.0


def test_measurements_kept_before_admissions_were_timed_can_still_be_read() -> None:
    table = msgspec.to_builtins(measured(load_profile("tiny-cpu")))
    del table["admissions"]
    assert msgspec.convert(table, Measurements).admissions == ()


def ticks(bursts: list[Burst], iteration_s: float, cost_s: float, end_s: float) -> list[float]:
    """Arrivals of a sequence's tokens: the iteration in which a burst ends is longer by all that its requests cost."""
    found, now, due = [0.0], 0.0, sorted(bursts, key=lambda burst: burst.end_s)
    while now < end_s:
        now += iteration_s
        while due and due[0].end_s <= now:
            now += due.pop(0).num_requests * cost_s
        found.append(now)
    return found


def test_what_a_burst_held_a_batch_up_by_is_separated_from_its_iterations() -> None:
    bursts = [Burst(1.003, 1.207, 8), Burst(2.0, 2.33, 8), Burst(3.1, 3.104, 4)]
    assert extra_s(ticks(bursts, 0.01, 0.002, 4.0), bursts) == pytest.approx([0.002] * 3)
    assert extra_s(ticks(bursts, 0.01, 0.0, 4.0), bursts) == pytest.approx([0.0] * 3, abs=1e-9)


def test_bursts_that_a_batch_does_not_outlast_say_nothing() -> None:
    arrivals = ticks([], 0.01, 0.0, 1.0)
    assert extra_s(arrivals, [Burst(-0.1, 0.1, 8), Burst(0.9, 1.2, 8)]) == []
    assert extra_s([0.0, 0.01, 0.02, 0.03], [Burst(0.011, 0.019, 1)]) == []
    assert extra_s([], [Burst(0.0, 1.0, 1)]) == []


def test_a_straight_line_needs_few_points() -> None:
    line = CostProfile("line", "made up", ((0, 0.01), (1000, 0.11)), 0.0, 0.01, 0.001, 0.0, 100_000)
    assert len(fitted(line).profile.prefill_points) <= 4


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.integers(1, 50_000), st.lists(st.floats(1e-5, 10), min_size=1, max_size=3), min_size=2))
def test_points_are_monotone_and_not_negative_whatever_was_measured(times: dict[int, list[float]]) -> None:
    points = prefill_points([PrefillTimes(n, 0, tuple(seconds)) for n, seconds in times.items()], 0.001)
    assert points[0][0] == 0
    assert [n for n, _ in points] == sorted({n for n, _ in points})
    assert [s for _, s in points] == sorted(s for _, s in points)
    assert points[0][1] >= 0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30))
def test_an_isotonic_fit_keeps_the_mean_and_leaves_sorted_values_alone(values: list[float]) -> None:
    result = isotonic(values, [1.0] * len(values))
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(result))
    assert sum(result) == pytest.approx(sum(values))
    assert isotonic(sorted(values), [1.0] * len(values)) == sorted(values)


def test_noisy_times_are_warned_of() -> None:
    [warning] = [w for w in fitted(load_profile("tiny-cpu"), gaussian(0.4)).warnings() if "repetitions" in w]
    assert "busy" in warning
    assert fitted(load_profile("a6000-mistral-7b"), gaussian(0.02)).warnings() == []


def test_too_little_is_refused() -> None:
    enough = measured(load_profile("tiny-cpu"))
    for too_little in ({"decode": ()}, {"prefill": enough.prefill[:1]}):
        with pytest.raises(ConfigError, match="at least two prompt lengths and of decoding"):
            fit_profile(msgspec.structs.replace(enough, **too_little), name="x", source="y")


# --- the plan ---


def test_a_plan_stays_within_what_the_replica_takes() -> None:
    plan = make_plan(2048, 4096)
    assert max(plan.lengths) == 2047
    assert all(cached + new <= 2047 for cached, new in plan.behind)
    assert all(batch * context < 4096 for batch, context in plan.decode)
    assert all(batch * tokens < 4096 and tokens < 2048 for batch, tokens in plan.admitting) and plan.admitting


def test_a_quick_plan_is_a_fraction_of_the_whole() -> None:
    assert make_plan(32_768, 200_000, quick=True).num_steps < make_plan(32_768, 200_000).num_steps / 3


def test_a_replica_with_hardly_any_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="sequences of 100 tokens at most"):
        make_plan(100, 200_000)
