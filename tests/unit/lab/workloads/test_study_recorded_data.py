"""The study's definitions, held to what is known of recorded traces and of the paper's own data set."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from preble.core.types import pack_tokens
from preble.lab.workloads import Segment, Workload, make_workload
from preble.lab.workloads.study import Distribution, Study, study
from support.shared_data import DATA, needs_data

pytestmark = needs_data


@cache
def recorded(file: str) -> Workload:
    return make_workload(str(DATA / file), None, seed=0)


@cache
def studied(file: str) -> Study:
    return study(recorded(file))


def percent(shares: Distribution) -> tuple[float, float]:
    return round(shares.mean * 100, 1), round(shares.sd * 100, 1)


def rounded(spread: Distribution, digits: int = 0) -> tuple[float, float]:
    return round(spread.mean, digits), round(spread.sd, digits)


def test_the_video_row_of_the_papers_table_1_is_reproduced_to_the_digit() -> None:
    """NExT-QA is the paper's own data set. Its outputs have one token more there: the one that begins a sequence."""
    video = studied("workloads/video.requests.jsonl.gz")
    assert rounded(video.prompt_tokens) == (9865, 5976)
    assert (round(video.output_tokens.mean + 1), round(video.output_tokens.sd, 1)) == (4, 1.5)
    assert percent(video.sharing.fraction) == (88.0, 31.9)
    assert rounded(video.sharing.key_portions.requests, 1) == (8.6, 2.0)
    assert round(video.sharing.key_portions.fraction.mean * 100) == 99
    assert video.sharing.key_portions.nodes == 1000


def test_the_agents_row_comes_out_when_nothing_is_shared_between_episodes() -> None:
    """(97 %, 14 %), (76 %, 12 %) and (48, 8) in the paper, whose prompts begin with a number of the environment."""
    workload = recorded("workloads/agent.requests.jsonl.gz")
    first = {session: number for number, session in enumerate(dict.fromkeys(r.session for r in workload.requests))}
    apart = (
        replace(r, segments=(Segment(tokens=pack_tokens([100_000 + first[r.session]])), *r.segments))
        for r in workload.requests
    )
    agent = study(replace(workload, requests=tuple(apart)))
    assert round(agent.sharing.fraction.mean * 100, 1) == pytest.approx(96.4, abs=0.1)
    assert round(agent.sharing.key_portions.fraction.mean * 100, 1) == pytest.approx(74.9, abs=0.5)
    assert round(agent.sharing.key_portions.requests.mean, 1) == 41.6
    assert agent.sessions is not None and agent.sessions.sessions == agent.sharing.key_portions.nodes == 136


@pytest.mark.parametrize(
    ("file", "requests_per_s", "mean_gap_ms", "median_gap_ms", "ratio", "median_ratio"),
    [
        ("traces/azure2023_conv.csv.gz", 5.53, 180.8, 118.4, 12.8, 3.58),
        ("traces/azure2023_code.csv.gz", 2.57, 389.7, 63.8, 163.5, 91.8),
    ],
)
def test_the_azure_traces_have_the_arrivals_and_ratios_known_of_them(
    file: str, requests_per_s: float, mean_gap_ms: float, median_gap_ms: float, ratio: float, median_ratio: float
) -> None:
    """What the paper calls the average gaps (118 ms, 63 ms) and ratios (4, 92) are the medians."""
    azure = studied(file)
    arrivals = azure.arrivals
    assert arrivals is not None and arrivals.requests_per_s is not None
    assert round(arrivals.requests_per_s, 2) == requests_per_s
    assert round(arrivals.gap_s.mean * 1e3, 1) == mean_gap_ms
    assert round(arrivals.gap_s.percentiles[50] * 1e3, 1) == median_gap_ms
    assert round(azure.prompt_to_output.mean, 1) == ratio
    assert azure.prompt_to_output.percentiles[50] == pytest.approx(median_ratio, abs=0.06)
    assert azure.sharing.mostly_shared < 0.01


def test_sessions_are_found_in_the_recorded_conversations() -> None:
    talks = studied("workloads/multiturn.requests.jsonl.gz")
    assert talks.sessions is not None
    assert (talks.sessions.sessions, talks.sessions.waiting, talks.requests) == (69, 874, 943)
    assert talks.sessions.growth_tokens is not None and talks.sessions.growth_tokens.percentiles[0] > 0
