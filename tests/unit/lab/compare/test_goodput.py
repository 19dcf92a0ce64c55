"""Policies compared where requests have targets: which runs there are, and what their goodput is."""

from __future__ import annotations

import msgspec
import pytest

from preble.core.types import Target
from preble.errors import ConfigError
from preble.lab.compare import ComparePlan, CompareResult, compare_policies
from preble.lab.compare.page import compare_page
from preble.lab.compare.plan import Arm
from preble.lab.compare.tables import goodput_table
from preble.lab.metrics.goodput import Goodput
from preble.lab.report.formats import significant
from preble.lab.sim import SimConfig
from preble.lab.workloads import Stream, WorkloadPlan
from preble.profiles import load_profile

PEOPLE, BATCH = "toolbench", "longdoc"
SOON = Target(ttft_s=2.0)
TARGETS = {"": Target(ttft_s=0.5), BATCH: Target(ttft_s=60.0)}


def mix(**changes: object) -> ComparePlan:
    """One replica that cannot serve in time what comes."""
    given: dict[str, object] = {
        "workloads": {"mix": WorkloadPlan(source=f"{PEOPLE}:4+{BATCH}", requests=60)},
        "policies": ("least_load",),
        "cluster": SimConfig(profile=load_profile("a6000-mistral-7b"), replicas=1),
        "seeds": (0,),
        "rates": (6.0,),
        "targets": TARGETS,
    }
    return ComparePlan(**(given | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def result() -> CompareResult:
    return compare_policies(mix(), jobs=1)


def goodput_of(result: CompareResult, policy: str) -> dict[str, Goodput]:
    [run] = [run for run in result.runs if run.policy == policy]
    return run.goodput


def test_every_policy_runs_without_and_with_the_targets_and_only_the_first_are_ranked(result: CompareResult) -> None:
    assert [run.policy for run in result.runs] == ["least_load", "least_load, promising"]
    assert [standing.policy for standing in result.standings] == ["least_load"]


def test_who_knows_the_targets_refuses_some_and_keeps_more(result: CompareResult) -> None:
    blind, promising = (goodput_of(result, name) for name in ("least_load", "least_load, promising"))
    assert blind[""].answered == blind[""].asked == 60
    assert promising[""].answered < promising[""].asked == 60
    assert promising[""].in_time > blind[""].in_time
    assert promising[""].kept > blind[""].kept


def test_each_class_is_counted_for_itself(result: CompareResult) -> None:
    for of_run in (run.goodput for run in result.runs):
        assert of_run[PEOPLE].asked == 48 and of_run[BATCH].asked == 12
        assert of_run[PEOPLE].in_time + of_run[BATCH].in_time == of_run[""].in_time
    assert goodput_of(result, "least_load")[BATCH].share == 1.0


def test_a_stream_of_a_scenario_is_a_class() -> None:
    streams = (Stream(name="chat", question_tokens=20), Stream(name="night", prefixes=3))
    plan = WorkloadPlan(source="two", streams=streams, requests=30, rps=10.0)
    assert plan.classes == ("chat", "night")
    assert {plan.class_of(request) for request in plan.make().requests} == {"chat", "night"}


def test_each_tenant_is_counted_for_itself_and_has_its_fair_turn() -> None:
    """One tenant asks eight times as much as can be served, with two streams; the other one's share fits."""
    streams = (
        Stream(name="flood", share=12.0, prefix_tokens=4000, tenant="greedy"),
        Stream(name="night", share=4.0, prefix_tokens=4000, tenant="greedy"),
        Stream(name="chat", share=1.0, tenant="modest"),
    )
    plan = mix(
        workloads={"two": WorkloadPlan(source="two", streams=streams, requests=170)}, rates=(17.0,), targets={"": SOON}
    )
    result = compare_policies(plan, jobs=1)
    for run in result.runs:
        of_tenant = run.goodput_of_tenants
        assert of_tenant.keys() == {"", "greedy", "modest"} and run.goodput.keys() == {"", "flood", "night", "chat"}
        assert of_tenant["greedy"].asked == run.goodput["flood"].asked + run.goodput["night"].asked
        assert of_tenant["greedy"].in_time + of_tenant["modest"].in_time == run.goodput[""].in_time
    promising = next(run for run in result.runs if run.policy == "least_load, promising").goodput_of_tenants
    assert promising["modest"].share > promising["greedy"].share
    table = goodput_table(result, "two", 17.0)
    assert {"chat in time", "tenant greedy in time", "tenant modest in time"} <= set(table.columns)
    shown = table.rows[0][table.columns.index("tenant modest in time")]
    assert shown.startswith(f"{promising['modest'].share:.1%}, ")
    assert msgspec.json.decode(msgspec.json.encode(result), type=CompareResult) == result


def test_a_workload_of_one_kind_has_no_classes() -> None:
    plan = WorkloadPlan(source="tool_use", requests=3, rps=1.0)
    assert plan.classes == () and {plan.class_of(request) for request in plan.make().requests} == {""}
    result = compare_policies(mix(workloads={"tools": plan}, targets={"": Target(tpot_s=1.0)}, rates=(5.0,)), jobs=1)
    assert goodput_of(result, "least_load").keys() == {""}


def test_the_table_has_the_most_goodput_first_and_says_the_targets(result: CompareResult) -> None:
    table = goodput_table(result, "mix", 6.0)
    assert [row[0] for row in table.rows] == ["least_load, promising", "least_load"]
    assert f"others: TTFT ≤ 0.5 s; {BATCH}: TTFT ≤ 60 s" in table.caption
    column = table.columns.index(f"{BATCH} in time")
    for row in table.rows:
        of_class = goodput_of(result, row[0])[BATCH]
        assert row[column] == f"{of_class.share:.1%}, {significant(of_class.per_s, 3)}/s"
    assert "least_load, promising" in compare_page(result)


def test_capacities_are_searched_without_targets() -> None:
    plan = mix(rates=(), lasting_s=60.0)
    assert [arm.policy for arm in plan.arms()] == ["least_load"]
    arm = Arm("mix", "least_load", 0)
    assert plan.cell(arm, 1.0).slo is not None and not plan.cell(arm, 1.0).targets
    assert plan.grid_cell(arm, 1.0).slo is None and plan.grid_cell(arm, 1.0).targets == TARGETS


def test_runs_are_kept_apart_by_what_is_asked_and_what_is_known_and_older_ones_stay() -> None:
    plan, without = mix(), mix(targets={})
    blind, promising = (plan.grid_cell(Arm("mix", f"least_load{what}", 0), 6.0) for what in ("", ", promising"))
    other = mix(targets={"": Target(ttft_s=0.6)}).grid_cell(blind.arm, 6.0)
    assert len({blind.key, promising.key, other.key, without.grid_cell(blind.arm, 6.0).key}) == 4
    assert without.grid_cell(blind.arm, 6.0).key == plan.cell(blind.arm, 6.0).key


def test_a_result_reads_back_as_it_was(result: CompareResult) -> None:
    assert msgspec.json.decode(msgspec.json.encode(result), type=CompareResult) == result


def test_a_target_of_a_class_that_no_workload_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="no workload has the class elsewhere"):
        mix(targets={"elsewhere": Target(ttft_s=1.0)})
