"""Arrivals taken from a recorded trace."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from preble.errors import ConfigError, TraceFormatError
from preble.lab.workloads import WorkloadPlan
from preble.lab.workloads.arrivals import make_arrivals
from preble.lab.workloads.recorded import recorded_arrivals
from support.traces import file_of

TIMES_MS = (0, 1000, 1500, 4500, 4500, 6500)


def trace_of(folder: Path, times_ms: tuple[int, ...] = TIMES_MS, name: str = "day.jsonl") -> Path:
    """A trace with a request at each of these times."""
    lines = [{"timestamp": time, "client": 0, "input_length": 9, "output_length": 1} for time in times_ms]
    return file_of(folder, lines, name)


def test_recorded_gaps_are_kept_as_they_are_without_a_rate(tmp_path: Path) -> None:
    assert recorded_arrivals(str(trace_of(tmp_path)), 6, None) == [0.0, 1.0, 1.5, 4.5, 4.5, 6.5]


def test_fewer_arrivals_than_recorded_are_the_first_of_them(tmp_path: Path) -> None:
    assert recorded_arrivals(str(trace_of(tmp_path)), 3, None) == [0.0, 1.0, 1.5]
    assert recorded_arrivals(str(trace_of(tmp_path)), 1, None) == [0.0]
    assert recorded_arrivals(str(trace_of(tmp_path)), 0, None) == []


def test_more_arrivals_than_recorded_repeat_the_gaps(tmp_path: Path) -> None:
    assert recorded_arrivals(f"{trace_of(tmp_path)}[0:3]", 6, None) == [0.0, 1.0, 1.5, 2.5, 3.0, 4.0]


@pytest.mark.parametrize(
    ("stretch", "times"),
    [("[1:4]", [0.0, 0.5, 3.5]), ("[:2]", [0.0, 1.0]), ("[4:]", [0.0, 2.0]), ("[:]", [0.0, 1.0, 1.5, 4.5, 4.5, 6.5])],
)
def test_a_stretch_begins_at_zero(tmp_path: Path, stretch: str, times: list[float]) -> None:
    assert recorded_arrivals(f"{trace_of(tmp_path)}{stretch}", len(times), None) == times


def test_gaps_are_scaled_to_the_rate(tmp_path: Path) -> None:
    """Five gaps of 6.5 s in all have 0.769 requests/s: at twice that they are half as long."""
    times = recorded_arrivals(str(trace_of(tmp_path)), 6, 2 * 5 / 6.5)
    assert times == pytest.approx([0.0, 0.5, 0.75, 2.25, 2.25, 3.25])


def test_a_file_whose_own_name_ends_in_brackets_is_that_file(tmp_path: Path) -> None:
    trace_of(tmp_path)
    odd = trace_of(tmp_path, (0, 7000), name="day.jsonl[0:3]")
    assert recorded_arrivals(str(odd), 2, None) == [0.0, 7.0]


def test_only_requests_that_wait_for_no_other_count(tmp_path: Path) -> None:
    header = {"kind": "trace", "version": 1, "name": "t"}
    request = {"kind": "request", "text": "x", "output_tokens": 1, "session": "s"}
    lines = [
        header,
        {**request, "id": "a", "arrival_s": 3.0},
        {**request, "id": "b", "parent": "a", "arrival_s": 4.0},
        {**request, "id": "c", "arrival_s": 5.0},
    ]
    assert recorded_arrivals(str(file_of(tmp_path, lines)), 2, None) == [0.0, 2.0]


@pytest.mark.parametrize("stretch", ["[2:3]", "[6:]", "[4:2]"])
def test_a_stretch_without_a_gap_is_refused(tmp_path: Path, stretch: str) -> None:
    with pytest.raises(ConfigError, match="leaves fewer than two of 6 arrivals"):
        recorded_arrivals(f"{trace_of(tmp_path)}{stretch}", 2, 1.0)


def test_a_burst_cannot_be_scaled(tmp_path: Path) -> None:
    path = str(trace_of(tmp_path, (5, 5)))
    with pytest.raises(ConfigError, match="arrive at once"):
        recorded_arrivals(path, 2, 1.0)
    assert recorded_arrivals(path, 3, None) == [0.0, 0.0, 0.0]


def test_a_rate_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be positive, got 0"):
        recorded_arrivals(str(trace_of(tmp_path)), 2, 0.0)


def test_a_trace_without_times_is_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path, [{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(ConfigError, match="has no arrival times"):
        recorded_arrivals(str(path), 2, 1.0)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match="cannot be read"):
        recorded_arrivals(str(tmp_path / "none.csv[1:9]"), 2, 1.0)


def test_a_plan_takes_the_arrivals_of_one_file_for_the_requests_of_another(tmp_path: Path) -> None:
    prompts = file_of(tmp_path, [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}], "prompts.jsonl")
    recording = f"{trace_of(tmp_path)}[1:4]"
    plan = WorkloadPlan(source=str(prompts), arrivals=recording)
    assert [request.arrival_s for request in plan.make().requests] == [0.0, 0.5, 3.5]
    faster = WorkloadPlan(source=str(prompts), arrivals=recording, rps=2.0)
    assert [request.arrival_s for request in faster.make().requests] == pytest.approx([0.0, 1 / 7, 1.0])


def test_arrivals_that_are_neither_a_kind_nor_a_file_are_refused_with_both_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown arrivals 'poison'; choose one of poisson, .*or a trace file"):
        make_arrivals("poison", 2, 1.0, random.Random(0))


def test_made_up_arrivals_need_a_rate() -> None:
    with pytest.raises(ConfigError, match="poisson arrivals need a rate"):
        make_arrivals("poisson", 2, None, random.Random(0))
