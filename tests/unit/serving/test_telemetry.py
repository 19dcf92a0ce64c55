"""The metrics' table, the numbers behind it, and their sums over processes."""

from __future__ import annotations

import dataclasses
import re
from unittest.mock import Mock

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from preble.config import MetricsConfig
from preble.config.keys import KeyConfig
from preble.core.types import Placement, Reason, ReplicaId, RequestId
from preble.core.types.life import Ended, FirstToken, Outcome, Started
from preble.rules.callers import Caller
from preble.serving.placed import LocalPlaced
from preble.serving.telemetry.metrics import LineRate, Telemetry
from preble.serving.telemetry.numbers import Numbers, Reading, note
from preble.serving.telemetry.table import TABLE, Kind
from preble.serving.terms import Terms


def samples(telemetry: Telemetry) -> dict[str, float]:
    """`name{label=value,...}` -> value, of the whole exposition."""
    found = {}
    for family in text_string_to_metric_families(telemetry.exposition().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def placement(replica: str = "a") -> Placement:
    return Placement(RequestId("r"), ReplicaId(replica), Reason.EXPLOIT, 80, 100)


def placed(replica: str = "a", caller: Caller = Caller()) -> LocalPlaced:  # noqa: B008
    terms = Terms("r", caller=caller, arrived_at=0.0)
    return LocalPlaced(
        placement(replica), Mock(), 0.125, request=Mock(), terms=terms, model="tiny", table=Mock(), place_again=Mock()
    )


def serve_one(telemetry: Telemetry, caller: Caller = Caller(), outcome: Outcome = Outcome.OK) -> None:  # noqa: B008
    one = placed(caller=caller)
    telemetry.on(one, Started(0.001), 0.125)
    telemetry.on(one, FirstToken(), 0.375)
    telemetry.on(one, Ended(outcome, output_tokens=7, cached_tokens=64), 0.875)


def test_every_metric_follows_prometheus_rules_for_names() -> None:
    for one in TABLE:
        assert re.fullmatch(r"preble_[a-z0-9_]+", one.name)
        assert one.name.endswith("_total") == (one.kind is Kind.COUNTER)
        assert bool(one.bounds) == (one.kind is Kind.HISTOGRAM) and list(one.bounds) == sorted(set(one.bounds))
        assert one.text.endswith(".") and "le" not in one.labels
    assert len({one.name for one in TABLE}) == len(TABLE)


def test_a_value_counts_in_the_first_bucket_that_is_large_enough() -> None:
    cell = [0.0] * 4
    for value in (0.5, 1.0, 1.5, 9.0):
        note(cell, (1.0, 2.0), value)
    assert cell == [2.0, 1.0, 1.0, 12.0]


def test_a_request_is_counted_under_its_model_and_replica() -> None:
    telemetry = Telemetry()
    serve_one(telemetry)
    shown = samples(telemetry)
    assert shown["preble_placements_total{model=tiny,reason=exploit,replica=a}"] == 1
    assert shown["preble_in_flight{model=tiny,replica=a}"] == 0
    assert shown["preble_output_tokens_total{model=tiny,replica=a}"] == 7
    assert shown["preble_ttft_seconds_bucket{le=0.25,model=tiny}"] == 0
    assert shown["preble_ttft_seconds_bucket{le=0.5,model=tiny}"] == 1
    assert (
        shown["preble_ttft_seconds_bucket{le=+Inf,model=tiny}"] == shown["preble_ttft_seconds_count{model=tiny}"] == 1
    )
    assert shown["preble_ttft_seconds_sum{model=tiny}"] == 0.375
    assert shown["preble_replica_ttft_seconds_sum{model=tiny,replica=a}"] == 0.25
    assert shown["preble_finished_total{model=tiny,outcome=ok}"] == 1


def test_the_error_of_a_prediction_is_measured_from_the_placement() -> None:
    telemetry = Telemetry()
    for predicted_s in (0.125, 0.5, None):
        one = placed()
        one.placement = dataclasses.replace(one.placement, predicted_ttft_s=predicted_s)
        telemetry.on(one, Started(0.001), 0.125)
        telemetry.on(one, FirstToken(), 0.375)
    shown = samples(telemetry)
    assert shown["preble_ttft_error_seconds_count{model=tiny}"] == 2
    assert shown["preble_ttft_error_seconds_sum{model=tiny}"] == 0.125 + 0.25


def test_the_coverage_of_predictions_is_counted() -> None:
    telemetry = Telemetry()
    for p98_s in (0.5, 0.25, 0.125, None):
        one = placed()
        one.placement = dataclasses.replace(one.placement, predicted_ttft_p98_s=p98_s)
        telemetry.on(one, Started(0.001), 0.125)
        telemetry.on(one, FirstToken(), 0.375)
    shown = samples(telemetry)
    assert shown["preble_ttft_p98_total{model=tiny,outcome=within}"] == 2
    assert shown["preble_ttft_p98_total{model=tiny,outcome=over}"] == 1


def test_the_pace_of_a_streamed_answer_is_compared_with_the_predicted_one() -> None:
    """Two seconds for each of 16 further tokens. A shorter answer, and one that failed, tell nothing."""
    telemetry = Telemetry()
    for p98_s, ended in (
        *((2.0, Ended(Outcome.OK, output_tokens=17)), (1.75, Ended(Outcome.OK, output_tokens=17))),
        *((2.0, Ended(Outcome.OK, output_tokens=15)), (2.0, Ended(Outcome.ABORTED, output_tokens=17))),
    ):
        one = placed()
        one.placement = dataclasses.replace(one.placement, predicted_tpot_s=1.5, predicted_tpot_p98_s=p98_s)
        telemetry.on(one, Started(0.001), 0.125)
        one.begun_at = 0.375
        telemetry.on(one, ended, 0.375 + 16 * 2.0)
    shown = samples(telemetry)
    assert shown["preble_tpot_error_seconds_count{model=tiny}"] == 2
    assert shown["preble_tpot_error_seconds_sum{model=tiny}"] == 0.5 + 0.5
    assert shown["preble_tpot_p98_total{model=tiny,outcome=within}"] == 1
    assert shown["preble_tpot_p98_total{model=tiny,outcome=over}"] == 1


def test_a_failed_request_has_no_time_to_its_end() -> None:
    telemetry = Telemetry()
    serve_one(telemetry, outcome=Outcome.ENGINE_GONE)
    shown = samples(telemetry)
    assert shown["preble_e2e_seconds_count{model=tiny}"] == 0
    assert shown["preble_finished_total{model=tiny,outcome=engine_gone}"] == 1


def test_a_replica_that_is_gone_is_shown_no_more_and_models_stay() -> None:
    telemetry = Telemetry()
    serve_one(telemetry)
    telemetry.replica_up(ReplicaId("a"))
    telemetry.forget_replica(ReplicaId("a"))
    shown = samples(telemetry)
    assert not [name for name in shown if "replica=a" in name]
    assert shown["preble_ttft_seconds_count{model=tiny}"] == 1
    serve_one(telemetry)
    assert samples(telemetry)["preble_placements_total{model=tiny,reason=exploit,replica=a}"] == 1


def test_the_numbers_of_several_processes_are_summed() -> None:
    other = Telemetry(process="front-1")
    serve_one(other)
    sent = msgspec.msgpack.encode(other.numbers.state())
    received = msgspec.msgpack.decode(sent, type=list[Reading])
    telemetry = Telemetry(others=lambda: [received])
    serve_one(telemetry)
    shown = samples(telemetry)
    assert shown["preble_placements_total{model=tiny,reason=exploit,replica=a}"] == 2
    assert shown["preble_ttft_seconds_bucket{le=0.5,model=tiny}"] == 2
    assert shown["preble_ttft_seconds_sum{model=tiny}"] == 0.75
    assert {
        "preble_process_cpu_seconds_total{process=gateway}",
        "preble_process_cpu_seconds_total{process=front-1}",
    } <= set(shown)


def test_counters_of_a_process_that_has_ended_stay_and_its_gauges_go() -> None:
    gone = Telemetry(process="front-1")
    serve_one(gone)
    gone.on(placed(), Started(0.001), 0.0)
    telemetry = Telemetry()
    telemetry.numbers.keep(gone.numbers.state())
    shown = samples(telemetry)
    assert shown["preble_placements_total{model=tiny,reason=exploit,replica=a}"] == 2
    assert "preble_in_flight{model=tiny,replica=a}" not in shown


@pytest.mark.parametrize("name", ["preble_queued_total", "preble_prompts_queued_total"])
def test_a_metric_that_is_not_in_the_table_cannot_be_counted(name: str) -> None:
    with pytest.raises(KeyError):
        Numbers().add(name)


def test_what_nobody_has_counted_and_has_no_label_is_there_as_zero() -> None:
    assert samples(Telemetry())["preble_retries_denied_total{}"] == 0


def test_metrics_of_the_same_meaning_have_vllms_names_too_where_they_are_wanted() -> None:
    telemetry = Telemetry(config=MetricsConfig(vllm_names=True))
    for replica in ("a", "b"):
        telemetry.on(placed(replica), Started(0.001), 0.0)
    telemetry.numbers.set("preble_kv_in_use_ratio", "a", to=0.2)
    telemetry.numbers.set("preble_kv_in_use_ratio", "b", to=0.6)
    telemetry.numbers.set("preble_prompts_queued", "tiny", to=3)
    shown = samples(telemetry)
    assert shown["vllm:prompt_tokens_total{model_name=tiny}"] == 200
    assert shown["vllm:num_requests_running{model_name=tiny}"] == 2
    assert shown["vllm:num_requests_waiting{model_name=tiny}"] == 3
    assert shown["vllm:kv_cache_usage_perc{}"] == pytest.approx(0.4)
    assert shown["vllm:time_to_first_token_seconds_count{model_name=tiny}"] == 0
    assert not [name for name in samples(Telemetry()) if name.startswith("vllm:")]


def sums_only(num_replicas: int) -> Telemetry:
    telemetry = Telemetry(config=MetricsConfig(per_replica=False))
    for number in range(num_replicas):
        telemetry.on(one := placed(f"r{number}"), Started(0.001), 0.125)
        telemetry.on(one, FirstToken(), 0.375)
        telemetry.replica_up(ReplicaId(f"r{number}"), events=True)
        telemetry.numbers.set("preble_kv_in_use_ratio", f"r{number}", to=0.5)
        telemetry.numbers.set("preble_replica_state", f"r{number}", "live" if number else "down", to=1)
    return telemetry


def test_without_series_of_replicas_there_are_their_sums_however_many_they_are() -> None:
    shown = samples(sums_only(3))
    assert not [name for name in shown if "replica=" in name]
    assert shown["preble_replica_up{}"] == 3
    assert shown["preble_replica_state{state=live}"] == 2
    assert shown["preble_prompt_tokens_total{model=tiny}"] == 300
    assert shown["preble_replica_ttft_seconds_count{model=tiny}"] == 3
    assert not [name for name in shown if name.startswith("preble_kv_in_use_ratio")], "the sum of ratios says nothing"
    assert samples(sums_only(400)).keys() == shown.keys()


def test_no_sum_over_replicas_shrinks_when_one_is_gone_for_good() -> None:
    telemetry = sums_only(3)
    telemetry.forget_replica(ReplicaId("r1"))
    telemetry.forget_replica(ReplicaId("r2"))
    shown = samples(telemetry)
    assert shown["preble_prompt_tokens_total{model=tiny}"] == 300
    assert shown["preble_replica_ttft_seconds_count{model=tiny}"] == 3
    assert shown["preble_replica_up{}"] == 1


def test_tenants_have_labels_where_they_are_wanted_and_only_so_many() -> None:
    telemetry = Telemetry(config=MetricsConfig(tenants=2))
    for name in ("one", "two", "three", "four", "one"):
        serve_one(telemetry, Caller(name=f"key-{name}", tenant=name, limits=KeyConfig("0" * 64)))
    serve_one(telemetry)
    shown = samples(telemetry)
    assert shown["preble_tenant_finished_total{model=tiny,outcome=ok,tenant=one}"] == 2
    assert shown["preble_tenant_finished_total{model=tiny,outcome=ok,tenant=other}"] == 2
    assert shown["preble_tenant_ttft_seconds_count{model=tiny,tenant=two}"] == 1
    assert shown["preble_tenant_tokens_total{kind=cached,model=tiny,tenant=one}"] == 128
    assert shown["preble_key_requests_total{key=key-three}"] == 1


def test_no_tenant_has_a_label_unless_it_is_wanted() -> None:
    telemetry = Telemetry()
    serve_one(telemetry, Caller(name="key", tenant="one"))
    assert not [name for name in samples(telemetry) if "tenant=" in name]
    assert samples(telemetry)["preble_key_tokens_total{key=key,kind=prompt}"] == 100


def test_the_process_and_the_interpreter_are_shown() -> None:
    shown = samples(Telemetry())
    assert shown["process_cpu_seconds_total{}"] > 0 and shown["process_open_fds{}"] > 0
    assert shown["preble_process_resident_bytes{process=gateway}"] > 1e6


def test_above_the_rate_lines_are_left_out_and_the_next_one_says_how_many() -> None:
    rate = LineRate(2)
    assert [rate.lets_through(now) for now in (1.0, 1.1, 1.2, 1.9, 2.0)] == [True, True, False, False, True]
    assert rate.num_left_out == 2
