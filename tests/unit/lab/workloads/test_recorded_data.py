"""Real traces, where there are any: what is known of them comes out of the loaders."""

from __future__ import annotations

import itertools
import statistics

import pytest

from preble.lab.workloads import Workload
from preble.lab.workloads.loaders import LoadOptions, read_trace
from preble.lab.workloads.recorded import recorded_arrivals
from support.shared_data import DATA, needs_data
from support.traces import assert_children_continue

pytestmark = needs_data


def prompt_tokens(workload: Workload) -> list[int]:
    return [sum(segment.num_tokens or 0 for segment in request.segments) for request in workload.requests]


def gaps_s(times_s: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times_s)]


def arrivals(workload: Workload) -> list[float]:
    return [request.arrival_s for request in workload.requests if request.arrival_s is not None]


@pytest.mark.parametrize(
    ("name", "requests", "mean_ms", "median_ms", "context", "generated"),
    [("code", 8819, 389.7, 63.8, 2048, 28), ("conv", 19366, 180.8, 118.4, 1155, 211)],
)
def test_azures_traces_have_their_known_gaps_and_lengths(
    name: str, requests: int, mean_ms: float, median_ms: float, context: int, generated: int
) -> None:
    workload = read_trace(DATA / "traces" / f"azure2023_{name}.csv.gz")
    gaps = gaps_s(arrivals(workload))
    assert len(workload.requests) == requests
    assert statistics.fmean(gaps) * 1000 == pytest.approx(mean_ms, abs=0.05)
    assert statistics.median(gaps) * 1000 == pytest.approx(median_ms, abs=0.05)
    assert statistics.fmean(prompt_tokens(workload)) == pytest.approx(context, abs=0.5)
    assert statistics.fmean(r.output_tokens for r in workload.requests) == pytest.approx(generated, abs=0.5)


def test_the_papers_slice_of_azure_comes_faster_by_the_factor_asked_for() -> None:
    """2,000 requests of the coding trace from number 200 on; the paper has them come in 0.7 of their time."""
    recording = f"{DATA / 'traces' / 'azure2023_code.csv.gz'}[200:2200]"
    as_recorded = recorded_arrivals(recording, 2000, None)
    faster = recorded_arrivals(recording, 2000, 1999 / as_recorded[-1] / 0.7)
    assert faster[-1] == pytest.approx(463, abs=0.5)
    gaps = gaps_s(faster)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(14, abs=0.5)


def test_every_mooncake_conversation_begins_with_the_same_block() -> None:
    path = DATA / "traces" / "mooncake_conversation_0-30min.jsonl.gz"
    workload = read_trace(path)
    assert len(workload.requests) == 5719
    assert len({id(request.segments[0]) for request in workload.requests}) == 1
    as_recorded = read_trace(path, options=LoadOptions(spread_ticks=False))
    assert sum(gap == 0 for gap in gaps_s(arrivals(as_recorded))) > 0.85 * 5719
    assert sum(gap == 0 for gap in gaps_s(arrivals(workload))) == 0
    assert max(abs(a - b) for a, b in zip(arrivals(workload), arrivals(as_recorded), strict=True)) < 3.01


def test_servegens_clients_are_distinguished() -> None:
    workload = read_trace(DATA / "traces" / "servegen_mlarge_30min.jsonl.gz")
    assert len(workload.requests) == 14974
    assert len({request.group for request in workload.requests}) == 63


@pytest.mark.parametrize(
    ("name", "requests", "prompt", "output", "children"),
    [
        ("toolbench", 4066, 1736, 43, 0),
        ("agent", 5658, 2318, 17, 5522),
        ("programming", 7720, 2722, 71, 0),
        ("video", 8564, 9865, 3, 0),
        ("longdoc", 1216, 18034, 17, 0),
        ("multiturn", 943, 2780, 39, 874),
    ],
)
def test_the_papers_workloads_have_the_lengths_that_their_files_say(
    name: str, requests: int, prompt: float, output: float, children: int
) -> None:
    workload = read_trace(DATA / "workloads" / f"{name}.requests.jsonl.gz")
    assert len(workload.requests) == requests
    assert statistics.fmean(prompt_tokens(workload)) == pytest.approx(prompt, abs=0.5)
    assert statistics.fmean(r.output_tokens for r in workload.requests) == pytest.approx(output, abs=0.5)
    assert assert_children_continue(workload) == children


@pytest.mark.parametrize("name", ["agent", "multiturn"])
def test_sessions_continue_as_text_too(name: str) -> None:
    workload = read_trace(DATA / "workloads" / f"{name}.requests.jsonl.gz", options=LoadOptions(text=True))
    by_id = {request.request_id: request for request in workload.requests}
    children = [request for request in workload.requests if request.parent is not None]
    assert children
    assert all(str(child.prompt()).startswith(str(by_id[str(child.parent)].prompt())) for child in children)
