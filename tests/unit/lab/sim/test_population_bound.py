"""The bound of streams without end: worked by hand, and no policy takes less GPU time in the simulator."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from preble.core.costs.model import CostProfile
from preble.core.policies.registry import policy_names
from preble.errors import ConfigError
from preble.lab.sim import SimConfig, simulate
from preble.lab.workloads import Stream
from preble.lab.workloads.streams import stream_workload
from support.scripts import script

pytestmark = pytest.mark.slow
module = script("benchmarks/repro/carried_rate.py")
carried_rate, least_gpu_s = module.carried_rate, module.least_gpu_s

# A token costs 1 ms, whatever shares an iteration with it.
PROFILE = CostProfile("unit", "made up", ((0, 0.0), (1000, 1.0)), 0.0, 0.0, 0.0, 0.0, 4096)
TWO = Stream(prefixes=2, prefix_tokens=96, question_tokens=4, output_tokens=1)


def config(replicas: int = 1, **settings: object) -> SimConfig:
    return SimConfig(**({"profile": PROFILE, "replicas": replicas, "max_running": 64} | settings))  # type: ignore[arg-type]


def test_where_the_caches_hold_everything_only_questions_are_computed() -> None:
    assert carried_rate([TWO], config(), patience_s=0.0) == pytest.approx(1000 / 4, rel=1e-3)
    assert carried_rate([TWO], config(replicas=3), patience_s=0.0) == pytest.approx(3000 / 4, rel=1e-3)


def test_of_what_is_asked_equally_often_the_share_that_does_not_fit_is_computed_each_time() -> None:
    missed = 96 * (1 - 112 / 192)
    assert carried_rate([TWO], config(kv_tokens=112), patience_s=0.0) == pytest.approx(1000 / (4 + missed), rel=1e-3)


def test_two_small_caches_hold_as_much_as_one_of_their_size() -> None:
    """Placements that keep each prefix on a replica of its own reach that."""
    assert carried_rate([TWO], config(replicas=2, kv_tokens=112), patience_s=0.0) == pytest.approx(2000 / 4, rel=1e-3)


def test_who_waits_shares_what_is_computed_for_the_first_of_them() -> None:
    """Each prefix is asked for five times a second; the others of a second find what the first has computed."""
    missed = 2 * 96 * (1 - 112 / 192) * 5 / (1 + 5 * 1.0)
    least_s = least_gpu_s(10.0, [TWO], config(kv_tokens=112), patience_s=1.0)
    assert least_s == pytest.approx((10 * 4 + missed) / 1000, rel=1e-3)


def test_the_popular_prefixes_are_the_ones_to_hold() -> None:
    """Of four prefixes by Zipf's law the first two, with 18 of 25 requests, fit."""
    four = Stream(prefixes=4, prefix_tokens=96, question_tokens=4, output_tokens=1, zipf=1.0)
    found = carried_rate([four], config(kv_tokens=192), patience_s=0.0)
    assert found == pytest.approx(1000 / (4 + 96 * 7 / 25), rel=1e-3)


def test_answers_need_room_for_as_long_as_they_take() -> None:
    """Iterations take 10 ms; each of the ten after the first holds 10 to 19 tokens of the cache, 1.45 token seconds."""
    flat = CostProfile("flat", "made up", ((0, 0.01), (1000, 0.01), (2000, 0.02)), 0.0, 0.01, 0.0, 0.0, 4096)
    alone = Stream(prefixes=1, prefix_tokens=0, question_tokens=10, output_tokens=11)
    small = config(profile=flat, kv_tokens=96)
    assert carried_rate([alone], small, patience_s=0.0) == pytest.approx(96 / 1.45, rel=1e-2)
    large = carried_rate([alone], config(profile=flat), patience_s=0.0)
    assert large == pytest.approx(64 / (10 * 0.01), rel=1e-3), "where there is room, as many run as may"


def test_a_replica_half_as_fast_counts_half() -> None:
    slow = config(replicas=2, speeds={"r1": 0.5})
    assert carried_rate([TWO], slow, patience_s=0.0) == pytest.approx(1500 / 4, rel=1e-3)


def test_what_changes_or_fits_nowhere_has_no_such_bound() -> None:
    for stream, wrong in (
        (Stream(flip_s=10.0), "changes"),
        (Stream(turns=2), "sessions"),
        (Stream(prefix_tokens=5000), "5139 tokens, more than the 4096"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            carried_rate([stream], config(), patience_s=0.0)
    with pytest.raises(ConfigError, match="0 replicas"):
        carried_rate([TWO], config(replicas=0), patience_s=0.0)


def some_profile(rng: Random) -> CostProfile:
    points = [(0, rng.choice([0.0, 0.005]))]
    for _ in range(rng.randint(1, 4)):
        tokens, seconds = points[-1]
        points.append((tokens + rng.randint(10, 200), seconds + rng.choice([0.002, 0.02, 0.05])))
    base_s, sequence_s = rng.choice([0.0, 0.01]), rng.choice([0.0, 1e-4])
    return CostProfile("any", "drawn", tuple(points), rng.choice([0.0, 1e-6]), base_s, sequence_s, 1e-6, 4096, 16, 1e-6)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_no_policy_takes_less_gpu_time_than_the_bound(seed: int) -> None:
    rng = Random(seed)
    stream = Stream(
        prefixes=rng.randint(1, 12),
        prefix_tokens=rng.choice([0, 64, 160]),
        question_tokens=rng.randint(4, 40),
        output_tokens=rng.choice([1, 8, 30]),
        zipf=rng.choice([0.0, 1.0]),
    )
    cluster = config(
        rng.randint(1, 3),
        profile=some_profile(rng),
        policy=rng.choice(policy_names()),
        kv_tokens=rng.choice([320, 640, 2048]),
        max_batch_tokens=256,
    )
    rps = rng.choice([0.4, 0.8]) * carried_rate([stream], cluster, patience_s=0.0)
    assume(rps < 1e4)
    asked = stream_workload([stream], rps, 600 / rps, 0.0, seed)
    run = simulate(cluster, asked)
    lasted_s = max(request.arrival_s or 0.0 for request in asked.requests)
    waited_s = max(record.ttft_s or 0.0 for record in run.records)
    least_s = least_gpu_s(len(asked.requests) / lasted_s, [stream], cluster, patience_s=waited_s)
    assert run.gpu_s >= 0.93 * lasted_s * least_s, "600 requests miss some per cent less or more by chance"
