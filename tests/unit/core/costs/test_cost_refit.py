"""The online correction of the cost model: it converges, stays in bounds, and is not led astray."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble.core.costs.model import CostModel
from preble.core.costs.refit import CostFactors, CostRefit, DecodeSample, PrefillSample, RefitSettings, scaled
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.registry import make_policy
from preble.core.types import ReplicaId, ReplicaSpec, Request
from preble.profiles import load_profile, profile_names

PROFILE = load_profile("a100-mistral-7b")


class Live:
    """Samples as a replica would give them whose profile is `PROFILE` times `truth`."""

    def __init__(self, truth: CostFactors, *, noise: float = 0.0, outliers: float = 0.0, seed: int = 0) -> None:
        self.refit = CostRefit(PROFILE)
        self._truth = CostModel(scaled(PROFILE, truth))
        self._noise = noise
        self._outliers = outliers
        self._random = Random(seed)
        self.now = 0.0

    def serve(self, requests: int) -> None:
        """One request a second, corrections as they get due."""
        for _ in range(requests):
            self.now += 1.0
            rng = self._random
            prefill = PrefillSample(rng.randrange(600, 4000), rng.randrange(4000), rng.randrange(8), 8000, 1.0)
            decode = DecodeSample(rng.randrange(16, 400), rng.randrange(1, 32), 20_000, 1.0)
            seconds = self._measured(prefill.predicted_s(self._truth))
            self.refit.note_prefill(
                PrefillSample(prefill.new_tokens, prefill.cached_tokens, prefill.num_decoding, 8000, seconds), self.now
            )
            seconds = self._measured(decode.predicted_s(self._truth))
            self.refit.note_decode(DecodeSample(decode.num_iterations, decode.num_sequences, 20_000, seconds), self.now)
            self.refit.refit(self.now)

    def _measured(self, seconds: float) -> float:
        if self._random.random() < self._outliers:
            return seconds * self._random.uniform(5.0, 50.0)
        return seconds * max(self._random.gauss(1.0, self._noise), 0.1)


@pytest.mark.parametrize(
    ("prefill", "decode"), [(2.0, 2.0), (0.5, 0.5), (2.0, 0.5), (0.6, 1.0), (1.0, 1.0), (3.5, 1.2)]
)
def test_a_wrong_profile_converges_to_the_truth(prefill: float, decode: float) -> None:
    live = Live(CostFactors(prefill, decode), noise=0.1)
    live.serve(300)
    assert live.refit.factors.prefill == pytest.approx(prefill, rel=0.08)
    assert live.refit.factors.decode == pytest.approx(decode, rel=0.08)


def test_a_requests_overhead_that_the_profile_knows_is_not_taken_for_slow_prefills() -> None:
    overhead_s = 0.05
    refit = CostRefit(replace(PROFILE, request_overhead_s=overhead_s))
    free = CostModel(PROFILE)
    for now in range(100):
        seconds = free.prefill_s(1000) + overhead_s
        refit.note_prefill(PrefillSample(1000, 0, 0, 0, seconds), now)
        refit.refit(now)
    assert refit.factors == CostFactors()


@pytest.mark.parametrize("seed", range(4))
def test_one_outlier_in_five_moves_it_little(seed: int) -> None:
    live = Live(CostFactors(2.0, 2.0), noise=0.1, outliers=0.2, seed=seed)
    live.serve(300)
    assert live.refit.factors.prefill == pytest.approx(2.0, rel=0.12)
    assert live.refit.factors.decode == pytest.approx(2.0, rel=0.12)


@pytest.mark.parametrize("truth", [0.05, 30.0])
def test_it_stays_within_four_times_the_profile(truth: float) -> None:
    live = Live(CostFactors(truth, truth))
    live.serve(600)
    bound = 4.0 if truth > 1 else 0.25
    assert live.refit.factors == CostFactors(bound, bound)


def test_it_moves_by_a_quarter_at_once_when_there_are_enough_samples_and_not_too_often() -> None:
    live = Live(CostFactors(4.0, 4.0))
    live.serve(7)
    assert live.refit.factors == CostFactors()
    live.serve(9)  # the sixteenth sample came with the eighth request; with the sixteenth, there are enough of each
    assert live.refit.factors == CostFactors()
    live.serve(2)  # and ten seconds after the first time it was due, it is again
    assert live.refit.factors == CostFactors(1.25, 1.25)
    live.serve(9)
    assert live.refit.factors == CostFactors(1.25, 1.25)


def test_a_right_profile_is_left_alone() -> None:
    live = Live(CostFactors(), noise=0.02)
    live.serve(200)
    assert live.refit.factors == CostFactors()
    assert live.refit.model.profile == PROFILE


def test_short_prefills_say_nothing() -> None:
    """They are mostly the fixed part of an iteration, and that is corrected from decodes."""
    refit = CostRefit(PROFILE)
    for i in range(100):
        refit.note_prefill(PrefillSample(200, 0, 0, 0, 10.0), float(i))
    assert refit.due_at is None


def test_equal_samples_make_equal_models() -> None:
    first, second = (Live(CostFactors(1.7, 0.6), noise=0.3, outliers=0.1) for _ in range(2))
    first.serve(200)
    second.serve(200)
    assert first.refit.factors == second.refit.factors
    assert first.refit.model.profile == second.refit.model.profile


factors = st.floats(0.25, 4.0)


@given(st.sampled_from(profile_names()), factors, factors, st.integers(1, 40_000), st.integers(1, 4000))
def test_a_corrected_profile_is_monotone_and_within_its_factors(
    name: str, prefill: float, decode: float, tokens: int, more: int
) -> None:
    profile = load_profile(name)
    before, after = CostModel(profile), CostModel(scaled(profile, CostFactors(prefill, decode)))
    assert after.prefill_s(tokens + more) >= after.prefill_s(tokens) >= 0.0
    low, high = sorted((prefill, decode))
    assert low * 0.999 <= after.prefill_s(tokens, 100) / before.prefill_s(tokens, 100) <= high * 1.001


@given(factors)
def test_equal_factors_multiply_everything(factor: float) -> None:
    before, after = CostModel(PROFILE), CostModel(scaled(PROFILE, CostFactors(factor, factor)))
    assert after.prefill_s(1000, 500) == pytest.approx(factor * before.prefill_s(1000, 500))
    assert after.decode_s(50, 500) == pytest.approx(factor * before.decode_s(50, 500))


@given(factors, factors)
def test_a_slower_prefill_does_not_slow_down_decoding(prefill: float, decode: float) -> None:
    profile = load_profile("a6000-mistral-7b")
    before, after = CostModel(profile), CostModel(scaled(profile, CostFactors(prefill, decode)))
    assert after.iteration_s((), 8, 0) == pytest.approx(decode * before.iteration_s((), 8, 0))


samples = st.lists(st.tuples(st.integers(1, 50_000), st.integers(1, 64), st.floats(0, 1e6)), max_size=80)


@settings(max_examples=50, deadline=None)
@given(samples)
def test_whatever_is_measured_the_factors_stay_in_bounds(measured: list[tuple[int, int, float]]) -> None:
    refit = CostRefit(PROFILE, RefitSettings(interval_s=0.0, min_samples=1))
    for i, (tokens, sequences, seconds) in enumerate(measured):
        refit.note_prefill(PrefillSample(tokens, 0, sequences - 1, tokens, seconds), float(i))
        refit.note_decode(DecodeSample(tokens, sequences, tokens, seconds), float(i))
        refit.refit(float(i))
    assert 0.25 <= refit.factors.prefill <= 4.0
    assert 0.25 <= refit.factors.decode <= 4.0


# --- through the scheduler's door ---


class Cluster:
    """A scheduler whose replicas are in truth `truth` times as slow as the profile says. Requests are served singly."""

    def __init__(self, truth: float, settings: RefitSettings | None = RefitSettings()) -> None:  # noqa: B008 (frozen)
        self.scheduler = GlobalScheduler(make_policy("e2"), CostModel(PROFILE), refit=settings)
        self.model = CostModel(scaled(PROFILE, CostFactors(truth, truth)))
        self.now = 0.0
        self.ids = map(str, count())
        for name in ("a", "b"):
            self.scheduler.add_replica(ReplicaSpec(ReplicaId(name)), 0.0)

    def place(self, num_tokens: int = 2000) -> Request:
        name = next(self.ids)
        request = Request.of(name, range(int(name) * 100_000, int(name) * 100_000 + num_tokens))
        self.placement = self.scheduler.place(request, self.now)
        return request

    def serve(self, output_tokens: int = 100) -> None:
        request = self.place()
        self.now += self.model.prefill_s(request.num_prompt_tokens)
        self.scheduler.on_first_token(request.request_id, self.now)
        context = request.num_prompt_tokens + output_tokens // 2
        self.now += (output_tokens - 1) * self.model.iteration_s((), 1, context)
        self.scheduler.on_finish(request.request_id, output_tokens, self.now)
        self.tick()

    def tick(self) -> None:
        due = self.scheduler.next_timer()
        if due is not None and due <= self.now:
            self.scheduler.on_timer(self.now)
        self.scheduler.check()


def test_a_scheduler_with_half_the_true_costs_learns_them() -> None:
    cluster = Cluster(2.0)
    for _ in range(120):
        cluster.serve()
    assert cluster.scheduler.snapshot().cost_factors.prefill == pytest.approx(2.0, rel=0.05)
    assert cluster.scheduler.snapshot().cost_factors.decode == pytest.approx(2.0, rel=0.05)
    cluster.place()
    [seen] = {candidate.prefill_s for candidate in cluster.placement.candidates}
    assert seen == pytest.approx(cluster.model.prefill_s(2000), rel=0.05)


def test_a_scheduler_that_is_not_to_learn_does_not() -> None:
    cluster = Cluster(2.0, None)
    for _ in range(60):
        cluster.serve()
    assert cluster.scheduler.snapshot().cost_factors == CostFactors()


def test_time_spent_in_a_queue_is_not_taken_for_prefill() -> None:
    """Eight at once on two replicas, one after the other on each: only the first ones could be undisturbed, and they
    are not either, since what came after them may have shared their iteration."""
    cluster = Cluster(1.0)
    for _ in range(40):
        requests = [cluster.place() for _ in range(8)]
        for request in requests:
            cluster.now += cluster.model.prefill_s(request.num_prompt_tokens)
            cluster.scheduler.on_first_token(request.request_id, cluster.now)
        for request in requests:
            cluster.scheduler.on_finish(request.request_id, 1, cluster.now)
        cluster.tick()
    assert cluster.scheduler.snapshot().cost_factors == CostFactors()


def test_an_answer_that_is_not_streamed_says_nothing_about_its_first_token() -> None:
    cluster = Cluster(1.0)
    for _ in range(100):
        request = cluster.place()
        cluster.now += 30.0
        cluster.scheduler.on_finish(request.request_id, 100, cluster.now)
        cluster.tick()
    assert cluster.scheduler.snapshot().cost_factors == CostFactors()


def test_what_the_replica_reports_as_cached_is_not_counted_as_computed() -> None:
    """Believed missing, in truth cached: such a prefill is quick, and says nothing of the profile."""
    cluster = Cluster(1.0)
    for _ in range(100):
        request = cluster.place()
        cluster.now += cluster.model.prefill_s(16, 1984)
        cluster.scheduler.on_first_token(request.request_id, cluster.now)
        cluster.scheduler.on_finish(request.request_id, 1, cluster.now, cached_tokens=1984)
        cluster.tick()
    assert cluster.scheduler.snapshot().cost_factors == CostFactors()


def test_the_load_in_the_window_follows_the_new_model_for_decoding_and_keeps_old_prefills() -> None:
    cluster = Cluster(2.0)
    while cluster.scheduler.snapshot().cost_factors == CostFactors():
        before = [cluster.scheduler.snapshot().replicas[ReplicaId(name)].load_s for name in ("a", "b")]
        cluster.serve()
    cluster.scheduler.check()
    after = [cluster.scheduler.snapshot().replicas[ReplicaId(name)].load_s for name in ("a", "b")]
    assert sum(after) > sum(before)


def test_a_replica_that_left_leaves_no_trace_in_the_next_one_of_its_slot() -> None:
    cluster = Cluster(2.0)
    cluster.place()
    cluster.scheduler.remove_replica(ReplicaId("a"), cluster.now)
    cluster.scheduler.remove_replica(ReplicaId("b"), cluster.now)
    cluster.scheduler.add_replica(ReplicaSpec(ReplicaId("c")), cluster.now)
    for _ in range(120):
        cluster.serve()
    assert cluster.scheduler.snapshot().cost_factors.prefill == pytest.approx(2.0, rel=0.05)
