"""The simulator against cases worked by hand, and what must hold of every run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble.core.admission.admission import FairAdmission
from preble.core.costs.model import CostModel, CostProfile
from preble.core.placing.timing_samples import MIN_OUTPUT_TOKENS
from preble.core.policies.registry import policy_names
from preble.core.policies.view import Choice, ClusterView
from preble.core.types import Placement, Reason, pack_tokens
from preble.decisions.settings import make_scheduler
from preble.errors import ConfigError
from preble.lab.metrics import RequestRecord
from preble.lab.metrics.itl import gap_s
from preble.lab.sim import Failure, FailureKind, SimConfig, SimResult, Simulation, simulate
from preble.lab.workloads import Segment, Workload, WorkloadPlan, WorkloadRequest
from preble.profiles import load_profile

# A token costs 1 ms to prefill; an iteration that decodes takes 10 ms or more.
PROFILE = CostProfile("unit", "made up", ((0, 0.0), (1000, 1.0)), 0.0, 0.01, 0.0, 0.0, 4096)
LOST, ADDED, RESTARTED = FailureKind.LOST, FailureKind.ADDED, FailureKind.RESTARTED


def config(replicas: int = 1, policy: str = "round_robin", **settings: object) -> SimConfig:
    return SimConfig(profile=PROFILE, replicas=replicas, policy=policy, **settings)  # type: ignore[arg-type]


def ask(
    request_id: str, num_tokens: int, output_tokens: int = 1, at: float | None = 0.0, seed: int = 0, **more: object
) -> WorkloadRequest:
    """A request for `num_tokens` tokens; those of one seed begin alike."""
    rng = Random(seed)
    prompt = Segment(tokens=pack_tokens(rng.randrange(1000) for _ in range(num_tokens)))
    return WorkloadRequest(request_id, (prompt,), output_tokens, arrival_s=at, **more)  # type: ignore[arg-type]


def play(config: SimConfig, *requests: WorkloadRequest) -> tuple[SimResult, dict[str, RequestRecord]]:
    """Run to the end and hold every invariant."""
    simulation = Simulation(config, Workload("test", requests))
    result = simulation.run()
    simulation.check()
    return result, {record.request_id: record for record in result.records}


# -- worked by hand ---------------------------------------------------------------------------------------------------


def test_one_request_takes_its_prefill_and_then_an_iteration_a_token() -> None:
    result, records = play(config(), ask("a", 100, output_tokens=3, at=2.0))
    assert records["a"].ttft_s == pytest.approx(0.1)
    assert records["a"].e2e_s == pytest.approx(0.1 + 2 * 0.01)
    assert result.gpu_s == pytest.approx(0.12)


def test_a_prompt_over_the_batch_budget_is_computed_in_chunks_between_which_others_decode() -> None:
    small = config(max_batch_tokens=100, max_running=10)
    _, records = play(small, ask("first", 50, output_tokens=4), ask("long", 249, at=0.01, seed=1))
    # 50 | 1 + 99 | 1 + 99 | 1 + 51 tokens
    assert records["first"].ttft_s == pytest.approx(0.05)
    assert records["first"].e2e_s == pytest.approx(0.05 + 0.1 + 0.1 + 0.052)
    assert records["long"].ttft_s == pytest.approx(0.05 + 0.1 + 0.1 + 0.052 - 0.01)


def test_requests_of_one_instant_share_the_first_batch_and_what_it_computes() -> None:
    """160 tokens are ten blocks; the last one is computed again, for the sake of its output."""
    result, records = play(config(), ask("a", 160), ask("b", 160))
    assert [records[name].cached_tokens for name in "ab"] == [0, 144]
    assert [records[name].ttft_s for name in "ab"] == pytest.approx([0.176, 0.176])
    assert result.replicas["r0"].prefill_tokens == 176


def test_a_request_waits_while_an_iteration_runs() -> None:
    _, records = play(config(), ask("a", 100), ask("b", 100, at=0.04, seed=1))
    assert records["b"].ttft_s == pytest.approx(0.06 + 0.1)


def test_the_iteration_that_admits_a_request_is_longer_for_all_that_are_in_it() -> None:
    dear = msgspec.structs.replace(config(), profile=replace(PROFILE, request_overhead_s=0.5))
    result, records = play(dear, ask("a", 100, output_tokens=4), ask("b", 50, at=0.605, seed=1))
    # 100 | 1 | 1 + 50 | 1 tokens; the first and the third admit a request.
    assert records["a"].ttft_s == pytest.approx(0.6)
    assert records["b"].ttft_s == pytest.approx(0.005 + 0.551)
    assert records["a"].e2e_s == pytest.approx(0.6 + 0.01 + 0.551 + 0.01)
    assert result.gpu_s == pytest.approx(1.171)


def test_the_way_to_a_replica_takes_the_dispatch_delay() -> None:
    _, records = play(config(dispatch_s=0.5), ask("a", 100))
    assert records["a"].ttft_s == pytest.approx(0.6)


def test_a_follower_is_sent_its_thinking_time_after_its_parents_end() -> None:
    parent = ask("parent", 100, session="s")
    child = ask("child", 200, at=None, session="s", parent="parent", delay_s=2.0)
    _, records = play(config(), parent, child)
    assert records["child"].scheduled_s == pytest.approx(0.1 + 2.0)
    assert records["child"].cached_tokens == 96


QUESTION, ANSWER, MORE = tuple(range(40)), tuple(range(500, 525)), tuple(range(900, 950))
"""The 64 tokens that are computed of a question and an answer are four blocks, of which the question fills two."""


def turn(name: str, token_ids: tuple[int, ...], parent: str | None = None) -> WorkloadRequest:
    """A request that is answered with as many tokens as ANSWER has, a second after its parent's end."""
    prompt = (Segment(tokens=pack_tokens(token_ids)),)
    at = None if parent else 0.0
    return WorkloadRequest(name, prompt, len(ANSWER), arrival_s=at, session="s", parent=parent, delay_s=1.0)


def hits(*turns: WorkloadRequest) -> list[int | None]:
    """Prompt tokens of each that one replica had cached."""
    _, records = play(config(), *turns)
    return [records[asked.request_id].cached_tokens for asked in turns]


def test_a_follower_finds_the_answer_that_its_prompt_quotes_in_the_cache() -> None:
    assert hits(turn("a", QUESTION), turn("b", QUESTION + ANSWER + MORE, parent="a")) == [0, 64]


def test_of_several_followers_the_first_has_the_answer() -> None:
    other = turn("c", QUESTION + MORE, parent="a")
    assert hits(turn("a", QUESTION), turn("b", QUESTION + ANSWER + MORE, parent="a"), other) == [0, 64, 32]


def test_what_is_not_quoted_of_an_answer_is_made_up() -> None:
    """Eight tokens of the answer are quoted, which fill the third block; the fourth is made up."""
    brief = turn("b", QUESTION + ANSWER[:8], parent="a")
    assert hits(turn("a", QUESTION), brief, turn("c", QUESTION + ANSWER + MORE, parent="a")) == [0, 32, 48]


def test_a_follower_that_does_not_continue_its_parents_prompt_quotes_nothing() -> None:
    assert hits(turn("a", QUESTION), turn("b", QUESTION[:36] + ANSWER + MORE, parent="a")) == [0, 32]


def test_kv_events_reach_the_scheduler_after_their_delay() -> None:
    """A prompt whose blocks are not reported by the end of the grace counts as not cached."""
    asked = [ask("a", 64), ask("again", 64, at=20.0)]
    matched: dict[str, int] = {}

    def note(placement: Placement, now: float) -> None:
        matched[placement.request_id] = placement.matched_tokens

    for delay_s, expected in ((0.001, 48), (30.0, 0)):
        Simulation(config(event_delay_s=delay_s), Workload("test", tuple(asked)), on_placement=note).run()
        assert matched["again"] == expected


def test_tokens_keep_the_times_that_98_of_100_are_predicted_to_keep() -> None:
    """The first and the further ones. At most four of a hundred come later: load changes, and an outcome is known only
    when it is there."""
    placed: dict[str, tuple[Placement, float]] = {}
    workload = WorkloadPlan(source="toolbench", requests=1000, rps=50.0).make()
    cluster = SimConfig(profile=load_profile("a6000-mistral-7b"))
    simulation = Simulation(
        cluster, workload, on_placement=lambda placement, now: placed.update({placement.request_id: (placement, now)})
    )
    first, further = [], []
    for record in simulation.run().records:
        placement, placed_at = placed[record.request_id]
        assert record.first_token_s is not None
        if placement.predicted_ttft_p98_s is not None:
            first.append(record.first_token_s - placed_at <= placement.predicted_ttft_p98_s)
        if placement.predicted_tpot_p98_s is not None and record.output_tokens >= MIN_OUTPUT_TOKENS:
            assert record.tpot_s is not None
            further.append(record.tpot_s <= placement.predicted_tpot_p98_s)
    assert (len(first) > 900, len(further) > 800) == (True, True)
    assert sum(first) > 0.96 * len(first)
    assert sum(further) > 0.96 * len(further)


# -- failures ---------------------------------------------------------------------------------------------------------


def test_the_queue_estimates_with_the_cost_model_as_corrected_so_far() -> None:
    """As in the gateway: with the profile as it was told, it would believe a wrong one for ever."""

    class Noting(FairAdmission):
        def use(self, cost_model: CostModel) -> None:
            used.append(cost_model)
            super().use(cost_model)

    used: list[CostModel] = []
    wrong = SimConfig(profile=load_profile("a6000-mistral-7b"), replicas=2, profile_error=1 / 1.5)
    scheduler = make_scheduler(msgspec.structs.replace(wrong.scheduler_settings, refit=True), wrong.told_profile)
    told = scheduler.cost_model
    Simulation(
        wrong,
        WorkloadPlan(source="toolbench", requests=200, rps=8.0).make(),
        scheduler=scheduler,
        admission=Noting(told),
    ).run()
    assert used[0] is told and used[-1] is scheduler.cost_model is not told


def test_a_replica_lost_before_the_first_token_costs_a_second_try_elsewhere() -> None:
    result, records = play(config(2, failures=(Failure(0.05, LOST, "r0"),)), ask("a", 100))
    assert (records["a"].error, records["a"].replica) == (None, "r1")
    assert records["a"].ttft_s == pytest.approx(0.05 + 0.1)
    assert result.gpu_s == pytest.approx(0.05 + 0.1)


def test_a_replica_lost_after_the_first_token_fails_the_request() -> None:
    _, records = play(config(2, failures=(Failure(0.105, LOST, "r0"),)), ask("a", 100, output_tokens=5))
    assert records["a"].error == "replica lost"
    assert records["a"].end_s == pytest.approx(0.105)


def test_a_request_that_lost_two_replicas_is_not_tried_again() -> None:
    script = (Failure(0.05, LOST, "r0"), Failure(0.06, LOST, "r1"))
    _, records = play(config(3, failures=script), ask("a", 100))
    assert records["a"].error == "replica lost"


def test_a_request_on_its_way_to_a_lost_replica_was_refused_and_may_try_again_and_again() -> None:
    script = (Failure(0.05, LOST, "r0"), Failure(0.06, LOST, "r1"))
    _, records = play(config(3, failures=script, dispatch_s=0.5), ask("a", 100))
    assert (records["a"].error, records["a"].replica) == (None, "r2")


def test_nobody_there_fails_the_request_and_all_that_wait_for_it() -> None:
    requests = [
        ask("a", 100, session="s"),
        ask("b", 100, at=None, session="s", parent="a"),
        ask("c", 100, at=None, session="s", parent="b"),
    ]
    _, records = play(config(failures=(Failure(0.05, LOST, "r0"),)), *requests)
    assert [records[name].error for name in "abc"] == ["no replica", "parent failed", "parent failed"]


def test_an_added_replica_gets_requests() -> None:
    _, records = play(config(0, failures=(Failure(1.0, ADDED, "new"),)), ask("a", 100), ask("b", 100, at=1.0))
    assert (records["a"].error, records["b"].replica) == ("no replica", "new")


def test_a_restarted_replica_has_an_empty_cache_and_is_known_to() -> None:
    requests = [ask("a", 160), ask("b", 160, at=1.0), ask("c", 160, at=3.0)]
    result, records = play(config(policy="e2", failures=(Failure(2.0, RESTARTED, "r0"),)), *requests)
    assert [records[name].cached_tokens for name in "abc"] == [0, 144, 0]
    assert [records[name].reason for name in "abc"] == ["explore", "exploit", "explore"]
    assert result.replicas["r0"].prefill_tokens == 160 + 16 + 160


def test_a_prompt_that_never_fits_is_refused_and_nothing_else_suffers() -> None:
    huge = [ask("prompt", 5000), ask("with output", 4000, output_tokens=200, seed=1), ask("fine", 100, seed=2)]
    _, records = play(config(), *huge)
    assert [record.error for record in records.values()].count("prompt too long") == 2
    assert records["fine"].ok


# -- what holds of every run ------------------------------------------------------------------------------------------


def mixed(num_requests: int, seed: int) -> list[WorkloadRequest]:
    """Prompts that share prefixes, some of them in sessions."""
    rng = Random(seed)
    requests: list[WorkloadRequest] = []
    for i in range(num_requests):
        waits = i > 0 and rng.random() < 0.2
        requests.append(
            ask(
                f"q{i}",
                rng.randint(1, 600),
                rng.randint(1, 30),
                at=None if waits else rng.uniform(0, 5),
                seed=rng.randrange(4),
                session="s",
                parent=f"q{rng.randrange(i)}" if waits else None,
                delay_s=rng.choice([0.0, 0.5]),
            )
        )
    return requests


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    policy=st.sampled_from(policy_names()),
    times=st.lists(st.floats(0, 8), max_size=4),
    kv_tokens=st.sampled_from([640, 4096]),
    dispatch_s=st.sampled_from([0.0, 0.1]),
)
def test_every_request_ends_once_whatever_fails(
    seed: int, policy: str, times: list[float], kv_tokens: int, dispatch_s: float
) -> None:
    kinds = (LOST, ADDED, RESTARTED, LOST)
    script = tuple(Failure(time_s, kind, "r0") for time_s, kind in zip(sorted(times), kinds, strict=False))
    asked = mixed(40, seed)
    small = config(2, policy, kv_tokens=kv_tokens, failures=script, dispatch_s=dispatch_s, seed=seed)
    result, records = play(small, *asked)
    assert Counter(record.request_id for record in result.records) == Counter(r.request_id for r in asked)
    assert {record.error for record in result.records} <= {None, "replica lost", "parent failed", "prompt too long"}
    for record in records.values():
        if record.ok:
            assert record.first_token_s is not None
            assert record.scheduled_s < record.first_token_s <= record.end_s


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    asked = Workload("test", tuple(mixed(120, seed=1)))

    def run(seed: int) -> bytes:
        return msgspec.json.encode(simulate(config(4, "e2", seed=seed, sample_s=0.5), asked).records)

    assert run(0) == run(0)
    assert run(0) != run(1)


class Last:
    """Everything to the last replica."""

    name = "last"

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        return Choice(view.replicas[-1], Reason.POLICY)


def test_a_policy_that_has_no_registered_name_can_be_simulated() -> None:
    asked = Workload("test", tuple(mixed(20, seed=3)))
    result = simulate(config(3), asked, policy=Last())
    assert {record.replica for record in result.records} == {"r2"}
    assert (result.policy, result.config.policy) == ("last", "round_robin")
    assert simulate(config(3), asked).policy == "round_robin"


def test_gpu_seconds_and_tokens_add_up() -> None:
    result, records = play(config(2, "e2", sample_s=0.25), *mixed(60, seed=2))
    assert result.gpu_s == pytest.approx(sum(totals.gpu_s for totals in result.replicas.values()))
    assert result.summary.output_tokens == sum(totals.generated_tokens for totals in result.replicas.values())
    assert result.summary.recomputed_tokens == sum(totals.prefill_tokens for totals in result.replicas.values())
    assert sum(result.reasons.values()) == len(records)


def test_the_timeline_samples_every_replica_at_regular_times() -> None:
    result, _ = play(config(2, sample_s=0.25), ask("a", 300, 3), ask("b", 300, 3, at=0.6, seed=1))
    series = result.timeline["r0"]
    assert series.time_s[:4] == [0.0, 0.25, 0.5, 0.75]
    assert (series.running[1], series.running[2]) == (1, 0)
    assert series.busy_s == sorted(series.busy_s)
    assert result.timeline["r1"].running[3] == 1
    assert series.prefill_tokens[-1] == 300


@pytest.mark.parametrize("text", ["10:lost", "10:gone:r0", "x:lost:r0", "-1:lost:r0", "nan:lost:r0", ""])
def test_a_failure_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="SECONDS:lost"):
        Failure.parse(text)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ((Failure(1.0, LOST, "r9"),), "'r9' is not there"),
        ((Failure(1.0, ADDED, "r0"),), "'r0' is there"),
        ((Failure(2.0, RESTARTED, "r0"), Failure(1.0, LOST, "r0")), "'r0' is not there"),
    ],
)
def test_a_script_that_cannot_happen_is_refused(script: tuple[Failure, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(failures=script)


@pytest.mark.parametrize(
    "wrong",
    [{"kv_tokens": 16}, {"sample_s": 0.0}, {"policy": "best"}, {"max_running": 4096}, {"dispatch_s": -1.0}],
)
def test_a_configuration_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        config(**wrong)  # type: ignore[arg-type]


# -- gaps between tokens ----------------------------------------------------------------------------------------------


def gaps_s(record: RequestRecord) -> list[float]:
    """The gaps in the middle of their keys, which is within half a percent of the truth."""
    return [gap_s(key) for key, times in record.gaps.items() for _ in range(times)]


def test_every_gap_between_two_tokens_counts_and_together_they_are_the_decoding_time() -> None:
    tight = config(kv_tokens=320, max_batch_tokens=64, max_running=8)
    result, records = play(tight, *(ask(f"r{i}", 60, output_tokens=60, seed=i, at=i * 0.01) for i in range(6)))
    assert sum(totals.preemptions for totals in result.replicas.values()) > 0
    for record in records.values():
        assert sum(record.gaps.values()) == record.output_tokens - 1
        assert record.first_token_s is not None
        assert sum(gaps_s(record)) == pytest.approx(record.end_s - record.first_token_s, rel=0.006)


def test_a_chunk_of_another_prompt_makes_the_gap_longer() -> None:
    result, _ = play(config(), ask("a", 16, output_tokens=11), ask("b", 1000, at=0.05, seed=1))
    assert result.summary.itl is not None
    assert result.summary.itl.p50_s == pytest.approx(0.01, rel=0.006)
    assert result.summary.itl.p999_s > 0.9
