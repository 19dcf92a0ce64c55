"""CostModel: never negative, monotone in everything, its two views of a decode step agree."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from preble.core.costs.model import CostModel, CostProfile
from preble.profiles import load_profile, profile_names

coefficients = st.floats(0, 1e-3)
tokens = st.integers(0, 100_000)
chunks = st.lists(st.tuples(st.integers(1, 4096), tokens), max_size=4)


@st.composite
def made_profiles(draw: st.DrawFn) -> CostProfile:
    steps = draw(st.lists(st.tuples(st.integers(1, 4096), st.floats(0, 2)), min_size=1, max_size=6))
    points = [(0, draw(st.floats(0, 1)))]
    for more_tokens, more_s in steps:
        points.append((points[-1][0] + more_tokens, points[-1][1] + more_s))
    return CostProfile(
        name="made",
        source="hypothesis",
        prefill_points=tuple(points),
        attention_s_per_pair=draw(coefficients),
        attention_s_per_context_token=draw(coefficients),
        decode_base_s=draw(st.floats(0, 1)),
        decode_s_per_sequence=draw(coefficients),
        decode_s_per_context_token=draw(coefficients),
        kv_capacity_tokens=1,
        typical_batch=draw(st.integers(1, 64)),
    )


profiles = st.one_of(st.sampled_from(profile_names()).map(load_profile), made_profiles())
models = profiles.map(CostModel)


def not_less(larger: float, smaller: float) -> bool:
    """`larger` >= `smaller`, but for the rounding of sums of floats."""
    return larger >= smaller or math.isclose(larger, smaller, rel_tol=1e-9)


@given(models, tokens, tokens, tokens, tokens)
def test_prefill_grows_with_both_kinds_of_tokens(
    model: CostModel, new: int, more: int, cached: int, deeper: int
) -> None:
    seconds = model.prefill_s(new, cached)
    assert seconds >= 0
    assert not_less(model.prefill_s(new + more, cached), seconds)
    assert not_less(model.prefill_s(new, cached + deeper), seconds)


@given(profiles, st.integers(1, 50_000))
def test_a_prefill_is_read_off_the_straight_line_between_two_points(profile: CostProfile, new: int) -> None:
    for (n0, s0), (n1, s1) in pairwise(profile.prefill_points):
        if new <= n1 or (n1, s1) == profile.prefill_points[-1]:
            expected_s = s0 + (new - n0) * (s1 - s0) / (n1 - n0)
            assert math.isclose(CostModel(profile).prefill_s(new), expected_s, rel_tol=1e-9, abs_tol=1e-9)
            return


@given(models, tokens)
def test_no_new_token_costs_nothing(model: CostModel, cached: int) -> None:
    assert model.prefill_s(0, cached) == 0
    assert model.decode_s(0, cached) == 0
    assert model.iteration_s((), 0, 0) == 0


@given(models, st.floats(0, 4096), st.floats(0, 4096), tokens, tokens)
def test_decode_grows_with_output_and_context(
    model: CostModel, output: float, more: float, context: int, longer: int
) -> None:
    seconds = model.decode_s(output, context)
    assert seconds >= 0
    assert not_less(model.decode_s(output + more, context), seconds)
    assert not_less(model.decode_s(output, context + longer), seconds)


@given(
    models, chunks, st.tuples(st.integers(1, 4096), tokens), st.integers(0, 300), st.integers(0, 300), tokens, tokens
)
def test_an_iteration_grows_with_whatever_is_added(
    model: CostModel,
    prefills: list[tuple[int, int]],
    chunk: tuple[int, int],
    decodes: int,
    more: int,
    context: int,
    longer: int,
) -> None:
    seconds = model.iteration_s(prefills, decodes, context)
    assert seconds >= 0
    assert not_less(model.iteration_s([*prefills, chunk], decodes, context), seconds)
    assert not_less(model.iteration_s(prefills, decodes + more, context), seconds)
    assert not_less(model.iteration_s(prefills, decodes, context + longer), seconds)


@given(models, st.integers(1, 8192), tokens)
def test_an_iteration_of_one_prompt_is_its_prefill(model: CostModel, new: int, cached: int) -> None:
    assert math.isclose(model.iteration_s([(new, cached)], 0, 0), model.prefill_s(new, cached))


@given(models, st.integers(0, 8192))
def test_sequences_that_share_an_iteration_are_charged_its_time(model: CostModel, context: int) -> None:
    sequences = model.profile.typical_batch
    step = model.iteration_s((), sequences, sequences * context)
    assert math.isclose(sequences * model.decode_s(1, context), step)


@given(models, chunks, st.integers(1, 300), tokens)
def test_a_mixed_iteration_costs_at_least_each_of_its_parts(
    model: CostModel, prefills: list[tuple[int, int]], decodes: int, context: int
) -> None:
    mixed = model.iteration_s(prefills, decodes, context)
    assert not_less(mixed, model.iteration_s(prefills, 0, 0))
    assert not_less(mixed, model.iteration_s((), decodes, context))
