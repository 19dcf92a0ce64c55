"""Whether a run settles: on series made by hand, and on simulated runs that do and do not."""

from __future__ import annotations

import random

import pytest

from preble.lab.compare import ComparePlan, CompareResult, compare_policies
from preble.lab.compare.early import watch_of
from preble.lab.compare.numbers import caution
from preble.lab.compare.page import compare_page
from preble.lab.compare.plan import Arm
from preble.lab.compare.tables import rate_table
from preble.lab.metrics import RequestRecord
from preble.lab.metrics.capacity import Bound, CapacitySlo, capacity
from preble.lab.metrics.steady import Steadiness, Verdict, drift, steadiness, warm_up
from preble.lab.sim import Failure, SimConfig
from preble.lab.workloads import Stream, WorkloadPlan
from preble.profiles import load_profile

SLO = CapacitySlo(ttft_p99_s=2.0)


def records(
    took_s: object, hit: object = lambda share: 0.5, lasting_s: float = 400.0, rps: float = 5.0
) -> list[RequestRecord]:
    """Requests at a steady rate. `took_s`, `hit`: of the part of the run that has passed, 0 to 1."""
    rng = random.Random(1)
    made = []
    for i in range(int(lasting_s * rps)):
        sent_s = i / rps
        share = sent_s / lasting_s
        e2e_s = took_s(share) * rng.uniform(0.8, 1.2)  # type: ignore[operator]
        made.append(
            RequestRecord(
                request_id=str(i),
                scheduled_s=sent_s,
                sent_s=sent_s,
                first_token_s=sent_s + e2e_s / 2,
                end_s=sent_s + e2e_s,
                prompt_tokens=100,
                cached_tokens=round(100 * hit(share)),  # type: ignore[operator]
            )
        )
    return made


def verdict(*of: object, **more: object) -> Steadiness:
    return steadiness(records(*of, **more), until_s=400.0, least_s=180.0)  # type: ignore[arg-type]


# -- the verdict ------------------------------------------------------------------------------------------------------


def test_a_run_that_stays_as_it_is_is_steady_and_all_of_it_counts() -> None:
    found = verdict(lambda share: 2.0)
    assert (found.verdict, found.is_carried) == (Verdict.STEADY, True)
    assert abs(found.queue_change) < 0.05 and found.hit_rate_change == pytest.approx(0.0)
    assert sum(found.series.in_system) / len(found.series.in_system) == pytest.approx(5.0 * 2.0, rel=0.05)


def test_a_queue_that_grows_is_not_steady_though_the_mean_is_small() -> None:
    found = verdict(lambda share: 1.0 + 1.5 * share)
    assert (found.verdict, found.is_carried) == (Verdict.GROWING, False)
    assert found.queue_change > 0.25
    assert str(found).startswith("not steady (in the system +")


def test_a_queue_that_rises_suddenly_at_the_end_is_not_steady() -> None:
    assert verdict(lambda share: 1.0 if share < 0.9 else 8.0).verdict is Verdict.GROWING


def test_a_hit_rate_that_falls_is_not_steady() -> None:
    found = verdict(lambda share: 2.0, lambda share: 0.8 - 0.2 * share)
    assert found.verdict is Verdict.GROWING
    assert found.hit_rate_change is not None and found.hit_rate_change < -0.02


def test_a_run_that_gets_better_to_its_end_is_warming_up_and_counts_as_carried() -> None:
    found = verdict(lambda share: 3.0 - 2.0 * share, lambda share: 0.2 + 0.6 * share)
    assert (found.verdict, found.is_carried) == (Verdict.WARMING, True)


def test_what_the_cold_caches_cost_at_the_beginning_is_left_out() -> None:
    found = verdict(lambda share: 20.0 if share < 0.1 else 1.0, lambda share: 0.0 if share < 0.1 else 0.9)
    assert found.verdict is Verdict.STEADY
    assert 40.0 <= found.warm_up_s <= 70.0
    assert found.summary.hit_rate == pytest.approx(0.9) and found.summary.e2e is not None
    assert found.summary.e2e.max_s < 2.0


def test_a_run_shorter_than_the_window_is_too_short_and_counts_as_a_whole() -> None:
    short = records(lambda share: 1.0, lasting_s=100.0)
    found = steadiness(short, until_s=100.0, least_s=180.0)
    assert (found.verdict, found.warm_up_s, found.summary.requests) == (Verdict.SHORT, 0.0, len(short))


def test_of_what_is_sent_after_the_last_arrival_nothing_is_judged() -> None:
    found = steadiness(records(lambda share: 1.0), until_s=200.0, least_s=180.0)
    assert (found.lasted_s, found.series.slice_s * len(found.series.in_system)) == (200.0, 200.0)
    assert found.summary.requests <= 1001


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_seldom_drifts(seed: int) -> None:
    rng = random.Random(seed)
    values = [10.0 + rng.gauss(0.0, 1.0) for _ in range(48)]
    found = drift(values)
    assert not found.is_sure or abs(found.change) < 2.5


def test_the_warm_up_is_at_most_half() -> None:
    assert warm_up([float(value) for value in range(100, 0, -1)]) == 50
    assert warm_up([1.0] * 20) == 0


def test_a_run_with_an_event_is_judged_from_the_event_on() -> None:
    """Found by itself, the warm-up would swallow the bad quarter that the event makes."""

    def took_s(share: float) -> float:
        return 8.0 if 0.25 < share < 0.45 else 1.0

    found = verdict(took_s)
    judged = steadiness(records(took_s), until_s=400.0, least_s=180.0, from_s=100.0)
    assert found.warm_up_s > 150.0
    assert judged.warm_up_s == pytest.approx(100.0, abs=judged.series.slice_s)
    assert found.summary.e2e is not None and judged.summary.e2e is not None
    assert judged.summary.e2e.p90_s > 2 * found.summary.e2e.p90_s


@pytest.mark.parametrize(
    ("stream", "failures", "event_s"),
    [
        (Stream(), (), None),
        (Stream(from_s=20.0), (), 30.0),
        (Stream(until_s=50.0), (), 60.0),
        (Stream(from_s=20.0, until_s=50.0), ("25:lost:r1",), 25.0),
    ],
)
def test_the_first_event_is_a_stream_that_changes_or_a_replica_that_does(
    stream: Stream, failures: tuple[str, ...], event_s: float | None
) -> None:
    cluster = SimConfig(profile=load_profile("a6000-mistral-7b"), failures=tuple(map(Failure.parse, failures)))
    plan = ComparePlan(
        workloads={"a": WorkloadPlan(source="a", streams=(stream,), warm_s=10.0)},
        policies=("preble",),
        cluster=cluster,
        lasting_s=60.0,
    )
    cell = plan.cell(Arm("a", "preble", 0), 5.0)
    assert (cell.warm_s, cell.first_event_s) == (10.0, event_s)
    assert getattr(watch_of(cell), "may_settle", None) is (event_s is None)


def test_nothing_has_no_verdict() -> None:
    with pytest.raises(ValueError, match="record"):
        steadiness([], until_s=1.0)


def test_a_refused_rate_is_not_carried_though_it_keeps_the_slo() -> None:
    summary = verdict(lambda share: 1.0).summary
    found = capacity([(10.0, summary), (20.0, summary)], SLO, refused={20.0})
    assert (found.rps, found.bound) == (10.0, Bound.EXACT)


# -- on the simulator -------------------------------------------------------------------------------------------------

PREFIXES = Stream(prefixes=40, prefix_tokens=2000, question_tokens=200, output_tokens=20)
CLUSTER = SimConfig(
    profile=load_profile("a6000-mistral-7b"), replicas=2, kv_tokens=60_032, block_size=64, window_s=10.0
)


def plan(**changes: object) -> ComparePlan:
    given: dict[str, object] = {
        "workloads": {"pure": WorkloadPlan(source="streams", streams=(PREFIXES,), warm_s=20.0)},
        "policies": ("sticky_until_saturated", "round_robin"),
        "cluster": CLUSTER,
        "seeds": (10,),
        "rates": (8.0, 60.0),
        "lasting_s": 40.0,
    }
    return ComparePlan(**(given | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def result() -> CompareResult:
    return compare_policies(plan(), jobs=1)


@pytest.mark.slow
def test_a_rate_that_the_cluster_carries_settles_and_one_beyond_it_ends_early_and_is_refused(
    result: CompareResult,
) -> None:
    easy, hard = (result.runs_of("pure", "sticky_until_saturated")[rate][0] for rate in (8.0, 60.0))
    assert easy.steady is not None and hard.steady is not None
    assert easy.steady.verdict is Verdict.STEADY and easy.is_carried(SLO)
    assert hard.steady.verdict is Verdict.GROWING and not hard.is_carried(SLO)
    assert hard.steady.lasted_s < 60.0
    assert (
        easy.judged.requests < easy.summary.requests
    )  # the warm-up asked for every prefix once, and counts for nothing
    assert not caution(result, "pure")


@pytest.mark.slow
def test_the_page_and_the_tables_tell_whether_runs_settle(result: CompareResult) -> None:
    table = rate_table(result, "pure", 60.0)
    assert table.columns[-1] == "settles" and all(row[-1].startswith("not steady (") for row in table.rows)
    page = compare_page(result)
    for said in ("over time at 8 requests/s", "over time at 60 requests/s", "requests in the system", "not steady"):
        assert said in page


@pytest.mark.slow
def test_a_capacity_is_found_however_high_the_search_has_to_go() -> None:
    result = compare_policies(plan(rates=(), loads=(0.5,), policies=("sticky_until_saturated",)), jobs=1)
    [standing] = result.standings
    assert standing.bound is Bound.EXACT
    assert 8.0 < standing.capacity_rps.mean < 60.0


def test_a_run_of_a_fixed_number_of_requests_goes_to_its_end_and_is_reported_as_short() -> None:
    few = WorkloadPlan(source="tool_use", requests=150)
    result = compare_policies(plan(workloads={"few": few}, rates=(20.0,), lasting_s=None), jobs=1)
    assert {run.steady.verdict for run in result.runs if run.steady} == {Verdict.SHORT}
    assert "less than the policy's window" in caution(result, "few")
    assert {run.judged for run in result.runs if run.judged is run.summary} or result.runs[0].judged.requests == 150


def test_the_population_does_not_depend_on_how_long_a_run_is() -> None:
    tools = plan(workloads={"tools": WorkloadPlan(source="toolbench")})
    cells = [next(tools.cells({"tools": [rate]})) for rate in (1.0, 100.0)]
    assert [cell.workload.num_prefixes for cell in cells] == [48, 48]
    assert [cell.workload.requests for cell in cells] == [300, 4000]
