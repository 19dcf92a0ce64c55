"""Named workloads made of made-up tokens: what is promised of each, whatever its statistics."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from preble.core.types import TOKEN_BYTES
from preble.errors import ConfigError
from preble.lab.workloads import Workload, make_workload, packed_prompt, read_trace, write_trace
from preble.lab.workloads.lengths import Family, Lengths
from preble.lab.workloads.popularity import Popularity, in_proportion

NAMES = ("toolbench", "agent", "programming", "video", "longdoc", "multiturn", "coding")
SHARING = ("toolbench", "programming", "video", "longdoc")
SESSIONS = ("agent", "multiturn")


def groups(workload: Workload) -> Counter[str | None]:
    return Counter(request.group for request in workload.requests)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_requests_and_another_gives_others(name: str) -> None:
    assert make_workload(name, 60, 5) == make_workload(name, 60, 5)
    assert make_workload(name, 60, 5) != make_workload(name, 60, 6)


def test_workloads_are_the_same_in_another_process() -> None:
    code = (
        "from preble.lab.workloads import make_workload, packed_prompt; from zlib import crc32;"
        f"print([crc32(packed_prompt(r)) for n in {NAMES} for r in make_workload(n, 40, 3).requests])"
    )
    run = [sys.executable, "-c", code]
    runs = {
        subprocess.run(run, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


@pytest.mark.parametrize("name", NAMES)
def test_there_are_as_many_requests_as_asked_for_each_with_its_own_id(name: str) -> None:
    workload = make_workload(name, 101, 0)
    assert len({request.request_id for request in workload.requests}) == 101
    assert not any(request.arrival_s is not None for request in workload.requests)


@pytest.mark.parametrize("name", NAMES)
def test_no_two_prompts_are_the_same(name: str) -> None:
    assert len({packed_prompt(request) for request in make_workload(name, 300, 0).requests}) == 300


@pytest.mark.parametrize("name", SHARING)
def test_requests_of_a_group_share_all_but_their_last_segment_in_memory(name: str) -> None:
    first_of = {}
    for request in make_workload(name, 300, 0, num_prefixes=10).requests:
        first = first_of.setdefault(request.group, request)
        assert all(a is b for a, b in zip(first.segments[:-1], request.segments[:-1], strict=True))
    assert len(first_of) == 10


@pytest.mark.parametrize("name", NAMES)
def test_other_seeds_ask_for_other_content(name: str) -> None:
    """So that a second run finds nothing of a first one in the caches but what all runs share."""
    prompts = [{packed_prompt(r) for r in make_workload(name, 50, seed).requests} for seed in (0, 1)]
    assert not prompts[0] & prompts[1]


@pytest.mark.parametrize("name", SESSIONS)
def test_a_childs_prompt_is_its_parents_then_the_answer_then_something_new(name: str) -> None:
    requests = {request.request_id: request for request in make_workload(name, 200, 0).requests}
    children = [request for request in requests.values() if request.parent is not None]
    assert len(children) > 100
    for child in children:
        parent = requests[child.parent or ""]
        assert parent.session == child.session
        *begin, answer, new = child.segments
        assert tuple(begin) == parent.segments
        assert answer.num_tokens == parent.output_tokens
        assert (new.num_tokens or 0) > 0


def test_episodes_of_agents_share_nothing_from_the_first_segment_on() -> None:
    openers = make_workload("agent", 500, 0).openers
    assert len({opener.segments[0].tokens for opener in openers}) == len(openers) > 5


def test_conversations_share_the_policy_of_their_assistant() -> None:
    workload = make_workload("multiturn", 500, 0, num_prefixes=3, popularity="uniform")
    policies = {(request.group, request.segments[0].tokens) for request in workload.requests}
    assert len(policies) == 3


def test_coding_agents_have_the_published_medians_and_their_sub_agents_are_waited_for() -> None:
    workload = make_workload("coding", 6000, 1)
    sessions = workload.sessions()
    own = [sum("." not in request.request_id for request in session) for session in sessions[:-1]]
    assert median(own) == pytest.approx(43, rel=0.15)
    called = [session for session in sessions if any("." in request.request_id for request in session)]
    assert len(called) / len(sessions) == pytest.approx(0.44, abs=0.12)
    assert median(request.output_tokens for request in workload.requests) == pytest.approx(345, rel=0.1)
    assert 30_000 < median(len(packed_prompt(request)) // TOKEN_BYTES for request in workload.requests) < 50_000
    prompts = {request.request_id: packed_prompt(request) for request in called[0]}
    waiting = [r for r in called[0] if "." not in r.request_id and r.parent is not None and "." in r.parent]
    assert len(waiting) == 1, "the agent goes on once, after a sub-agent"
    before = waiting[0].request_id.rpartition("-")
    caller = f"{before[0]}-{int(before[2]) - 1}"
    assert prompts[waiting[0].request_id].startswith(prompts[caller]), "on what it had said itself"
    first = [r for r in called[0] if "." in r.request_id and r.parent == caller]
    assert first and all(not prompts[r.request_id].startswith(prompts[caller][:40]) for r in first)


@pytest.mark.parametrize("name", SHARING)
def test_uniform_popularity_asks_for_all_alike(name: str) -> None:
    counts = groups(make_workload(name, 4000, 1, popularity="uniform", num_prefixes=8))
    assert len(counts) == 8
    assert max(counts.values()) < 1.25 * min(counts.values())


@pytest.mark.parametrize("name", SHARING)
def test_zipf_popularity_asks_by_rank(name: str) -> None:
    counts = groups(make_workload(name, 8000, 1, zipf=1.0, num_prefixes=16)).most_common()
    assert counts[0][1] / counts[1][1] == pytest.approx(2, rel=0.15)
    assert counts[0][1] / counts[3][1] == pytest.approx(4, rel=0.2)


def test_recorded_popularity_keeps_its_proportions_for_any_number_of_prefixes() -> None:
    """Videos have 8.6 questions, give or take 2: so a share, too, differs by a quarter or so."""
    counts = groups(make_workload("video", 4000, 1, num_prefixes=40)).values()
    assert len(counts) == 40
    assert 1.5 < max(counts) / min(counts) < 8


def test_an_agents_prefixes_are_its_episodes() -> None:
    sessions = Counter(request.session for request in make_workload("agent", 600, 0, num_prefixes=20).requests)
    assert len(sessions) == 20
    assert all(15 <= steps <= 50 for steps in sessions.values())


def test_popularity_means_nothing_for_agents() -> None:
    with pytest.raises(ConfigError, match=r"popularity zipf 1\.2 has no meaning for agent"):
        make_workload("agent", 10, 0, zipf=1.2)
    assert make_workload("agent", 10, 0, popularity="recorded") == make_workload("agent", 10, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_file_keeps_a_workload(name: str, tmp_path: Path) -> None:
    workload = make_workload(name, 120, 2)
    write_trace(tmp_path / "t.jsonl.gz", workload)
    assert read_trace(tmp_path / "t.jsonl.gz") == workload
    assert (tmp_path / "t.jsonl.gz").stat().st_size < 50_000, "made-up tokens are written as their number"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"popularity": "zpif"}, "choose one of uniform, zipf, recorded"),
        ({"popularity": "uniform", "zipf": 1.1}, "popularity uniform has no exponent"),
        ({"zipf": -1.0}, "Zipf exponent >= 0"),
        ({"num_prefixes": 0}, "at least one request and one prefix"),
    ],
)
def test_a_popularity_that_cannot_be_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_workload("toolbench", 10, 0, **arguments)


def test_shares_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="shares must be positive"):
        in_proportion(3, [0, 0])


def test_an_exponent_alone_means_zipf_and_zipf_alone_has_the_papers() -> None:
    assert Popularity.of(None, 0.9) == Popularity("zipf", 0.9)
    assert Popularity.of("zipf", None) == Popularity("zipf", 1.1)
    assert Popularity.of(None, None) is None


@pytest.mark.parametrize("family", ["normal", "lognormal", "gamma"])
def test_lengths_have_the_mean_and_deviation_asked_for_and_keep_their_bounds(family: Family) -> None:
    rng = random.Random(4)
    drawn = [Lengths(family, 500, 100).draw(rng) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(500, rel=0.02)
    assert statistics.pstdev(drawn) == pytest.approx(100, rel=0.03)
    bounded = [Lengths(family, 500, 100, low=450, high=520).draw(rng) for _ in range(500)]
    assert (min(bounded), max(bounded)) == (450, 520)


def test_unshared_prompts_share_nothing_and_have_the_lengths_of_azures_conversations() -> None:
    workload = make_workload("unshared", 5000, 0)
    prompts = [packed_prompt(request) for request in workload.requests]
    assert len({prompt[:16] for prompt in prompts}) == len(prompts)
    assert statistics.fmean(len(prompt) / TOKEN_BYTES for prompt in prompts) == pytest.approx(1155, rel=0.1)
    assert statistics.fmean(request.output_tokens for request in workload.requests) == pytest.approx(211, rel=0.1)
    assert workload == make_workload("unshared", 5000, 0) != make_workload("unshared", 5000, 1)
