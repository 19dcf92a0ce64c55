"""Replicas that differ, and a scheduler that knows late or wrongly, on the simulator."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from preble.cli import cli
from preble.errors import ConfigError
from preble.lab.sim import Failure, SimConfig, SimResult, Simulation, simulate
from preble.lab.workloads import Stream, Workload, WorkloadPlan
from preble.profiles import load_profile

PROFILE = load_profile("a6000-mistral-7b")


def workload(rps: float = 6.0, requests: int = 240) -> Workload:
    stream = Stream(prefixes=8, prefix_tokens=1500, question_tokens=200, output_tokens=20)
    return WorkloadPlan(source="asked", requests=requests, rps=rps, streams=(stream,)).make()


def run(policy: str = "least_load", **changes: object) -> SimResult:
    config = SimConfig(**{"profile": PROFILE, "replicas": 2, "policy": policy} | changes)  # type: ignore[arg-type]
    return simulate(config, workload())


def mean_ttft_s(result: SimResult) -> float:
    assert result.summary.ttft is not None
    return result.summary.ttft.mean_s


def test_a_slow_replica_takes_longer_for_the_same_and_gets_less_of_the_load() -> None:
    one = SimConfig(profile=PROFILE, replicas=1)
    alone = WorkloadPlan(source="asked", requests=1, rps=1.0, streams=(Stream(),)).make()
    usual, slow = (
        simulate(config, alone) for config in (one, SimConfig(profile=PROFILE, replicas=1, speeds={"r0": 0.5}))
    )
    assert slow.records[0].e2e_s == pytest.approx(2 * usual.records[0].e2e_s, rel=0.01)
    shared = run(speeds={"r1": 0.25})
    assert shared.summary.requests_per_replica["r1"] < shared.summary.requests_per_replica["r0"]


def test_a_replica_with_less_kv_holds_fewer_prefixes() -> None:
    spread = {"policy": "round_robin", "kv_tokens": 20_000}
    assert run(**spread, kv_shares={"r1": 0.25}).summary.hit_rate < run(**spread).summary.hit_rate  # type: ignore[arg-type, operator]


def test_a_replica_that_joins_can_differ_too() -> None:
    joined = run(failures=(Failure.parse("10:added:r2"),), speeds={"r2": 0.5}, kv_shares={"r2": 0.5})
    assert joined.summary.requests_per_replica["r2"] > 0


def test_a_wrong_profile_changes_what_the_scheduler_expects_and_not_how_long_things_take() -> None:
    right, wrong = run("round_robin"), run("round_robin", profile_error=2.0)
    assert wrong.summary == right.summary
    config = SimConfig(profile=PROFILE, profile_error=2.0)
    assert config.told_profile.prefill_points[-1][1] == pytest.approx(2 * PROFILE.prefill_points[-1][1])
    assert SimConfig(profile=PROFILE).told_profile is PROFILE


@pytest.mark.parametrize("policy", ["preble", "sticky_until_saturated", "least_load"])
def test_knowledge_that_comes_late_does_harm_but_loses_no_request(policy: str) -> None:
    crowd = workload(rps=25.0, requests=600)
    config = SimConfig(profile=PROFILE, replicas=4, policy=policy)
    late = SimConfig(profile=PROFILE, replicas=4, policy=policy, knowledge_delay_s=2.0)
    at_once, later = simulate(config, crowd), simulate(late, crowd)
    assert not later.summary.errors and later.records != at_once.records
    assert mean_ttft_s(later) > 0.9 * mean_ttft_s(at_once)


def test_what_ended_on_a_replica_before_it_was_lost_is_not_placed_again() -> None:
    config = SimConfig(
        profile=PROFILE, replicas=2, knowledge_delay_s=3.0, failures=(Failure.parse("20:lost:r1"),), policy="preble"
    )
    simulation = Simulation(config, workload())
    result = simulation.run()
    assert len({record.request_id for record in result.records}) == len(result.records) == result.summary.requests


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"speeds": {"r9": 0.5}}, "never there"),
        ({"speeds": {"r0": 0.0}}, "positive"),
        ({"kv_shares": {"r0": 1e-6}}, "two blocks"),
        ({"profile_error": 0.0}, "profile_error"),
        ({"knowledge_delay_s": -1.0}, "knowledge_delay_s"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run(**changes)


def test_flags_say_all_of_it() -> None:
    flags = "--speed r1=0.5 --kv-share r0=0.25 --profile-error 2 --knowledge-delay-s 0.1 --fail 3:added:r2 --speed r2=2"
    asked = ["simulate", "--requests", "40", "--rps", "10", "--replicas", "2", *flags.split(), "--json", "-"]
    result = CliRunner().invoke(cli, asked)
    assert result.exit_code == 0, result.stderr
    for said in ('"speeds":{"r1":0.5,"r2":2.0}', '"kv_shares":{"r0":0.25}', '"knowledge_delay_s":0.1'):
        assert said in result.stdout
    wrong = CliRunner().invoke(cli, ["simulate", "--rps", "1", "--speed", "fast"])
    assert wrong.exit_code == 2 and "REPLICA=X" in wrong.stderr
