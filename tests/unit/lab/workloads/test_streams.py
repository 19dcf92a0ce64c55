"""Scenarios: streams of requests whose populations stay, renew themselves or change their popularity."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from preble.errors import ConfigError, PrebleError
from preble.lab.workloads import Stream, Workload, WorkloadPlan, packed_prompt
from preble.lab.workloads.streams import stream_workload

RPS, LASTING_S = 20.0, 200.0


def made(*streams: Stream, lasting_s: float = LASTING_S, warm_s: float = 0.0, seed: int = 1) -> Workload:
    return stream_workload(streams, RPS, lasting_s, warm_s, seed)


def prefixes(workload: Workload, from_s: float = 0.0, until_s: float = 1e9) -> Counter[str]:
    names: Counter[str] = Counter()
    for request in workload.openers:
        if from_s <= (request.arrival_s or 0.0) < until_s:
            names[request.segments[0].segment_id or ""] += 1
    return names


def test_it_asks_at_the_rate_for_the_given_time_with_the_given_lengths() -> None:
    workload = made(Stream(prefixes=10, prefix_tokens=50, question_tokens=7, output_tokens=3))
    assert len(workload.requests) == pytest.approx(RPS * LASTING_S, rel=0.05)
    assert {len(packed_prompt(request)) // 4 for request in workload.requests} == {57}
    assert {request.output_tokens for request in workload.requests} == {3}
    assert max(request.arrival_s or 0.0 for request in workload.requests) < LASTING_S
    assert len(prefixes(workload)) == 10


def test_a_longer_run_begins_as_a_shorter_one_and_another_seed_is_another_workload() -> None:
    stream = Stream(renew_s=50.0, flip_s=10.0, zipf=1.0)
    short, long = made(stream, lasting_s=50.0), made(stream, lasting_s=150.0)
    assert long.requests[: len(short.requests)] == short.requests
    assert made(stream, seed=2).requests[0].segments != made(stream).requests[0].segments


def test_a_population_that_renews_itself_keeps_its_size_and_loses_its_members_one_by_one() -> None:
    workload = made(Stream(prefixes=50, renew_s=100.0))
    at_first, soon, late = (set(prefixes(workload, start, start + 20.0)) for start in (0.0, 20.0, 160.0))
    assert not at_first & late
    assert 0.5 < len(at_first & soon) / len(at_first) < 1.0
    assert len(set(prefixes(workload))) == pytest.approx(50 * 3, abs=25)


def test_a_popularity_that_flips_has_other_favourites_each_time() -> None:
    workload = made(Stream(prefixes=50, zipf=1.5, flip_s=20.0))
    favourites = [prefixes(workload, start, start + 20.0).most_common(1)[0] for start in range(0, 200, 20)]
    assert len({name for name, _ in favourites}) > 5
    assert all(count > 0.3 * RPS * 20.0 for _, count in favourites)


def test_how_long_an_answer_is_can_depend_on_the_prefix() -> None:
    workload = made(Stream(prefixes=40, long_every=10, long_output_tokens=2000, output_tokens=10))
    lengths = {(request.segments[0].segment_id, request.output_tokens) for request in workload.requests}
    assert Counter(tokens for _, tokens in lengths) == {10: 36, 2000: 4}


def test_a_flood_comes_and_goes_on_top_of_the_rest() -> None:
    everyday = Stream(name="everyday", share=1.0)
    flood = Stream(name="flood", share=3.0, from_s=100.0, until_s=120.0, prefixes=1)
    workload = made(everyday, flood)
    times = [request.arrival_s or 0.0 for request in workload.requests if request.group == "flood"]
    assert min(times) >= 100.0 and max(times) < 120.0
    assert len(times) == pytest.approx(0.75 * RPS * 20.0, rel=0.2)


def test_a_session_can_branch_and_each_branch_quotes_what_was_said_before() -> None:
    workload = made(Stream(turns=3, branches=2, prefix_tokens=20), lasting_s=20.0)
    session = workload.sessions()[0]
    assert len(session) == 1 + 2 + 4
    by_id = {request.request_id: request for request in session}
    for request in session[1:]:
        parent = by_id[request.parent or ""]
        assert packed_prompt(request).startswith(packed_prompt(parent))
    siblings = [request for request in session if request.parent == session[0].request_id]
    assert len({packed_prompt(request) for request in siblings}) == 2
    assert len(workload.requests) == pytest.approx(RPS * 20.0, rel=0.35)


def test_a_warm_up_asks_without_endy_prefix_once_before_the_rest() -> None:
    workload = made(Stream(prefixes=30), warm_s=60.0)
    assert set(prefixes(workload, 0.0, 60.0).values()) == {1} and len(prefixes(workload, 0.0, 60.0)) == 30
    assert min(request.arrival_s or 0.0 for request in workload.requests[30:]) >= 60.0


SCENARIO = """
warm_s = 5
[[stream]]
name = "documents"
prefixes = 3
prefix_tokens = 300
[[stream]]
name = "chats"
share = 9
prefix_tokens = 0
question_tokens = 50
"""


def test_a_scenario_file_is_a_workload(tmp_path: Path) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(SCENARIO)
    plan = WorkloadPlan(source=str(path), requests=500, rps=10.0)
    workload = plan.make()
    groups = Counter(request.group for request in workload.requests)
    assert groups["chats"] > 5 * groups["documents"]
    assert plan.files() == (path,)
    scenario = plan.scenario()
    assert scenario is not None
    same = WorkloadPlan(source="same", requests=500, rps=10.0, streams=scenario.stream, warm_s=scenario.warm_s)
    assert same.make() == workload


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[stream]]\nprefixes = 0", "prefixes must be positive"),
        ("[[stream]]\nzipf = -1.0", "zipf must not be negative"),
        ("[[stream]]\nlong_every = 3", "go together"),
        ("[[stream]]\nfrom_s = 9.0\nuntil_s = 3.0", "until_s must be after"),
        ("[[stream]]\nwords = 3", "words"),
        ("[[stream]]\n[[stream]]", "a name of its own"),
        ("warm_s = 3", "stream"),
        ("nonsense", "docs/reference/workloads.md"),
    ],
)
def test_what_is_wrong_in_a_scenario_is_said(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(PrebleError, match=says):
        WorkloadPlan(source=str(path), requests=10, rps=1.0).make()


def test_a_scenario_needs_a_rate() -> None:
    with pytest.raises(ConfigError, match="rate"):
        WorkloadPlan(source="mine", streams=(Stream(),), requests=10).make()
