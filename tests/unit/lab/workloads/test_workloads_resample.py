"""Requests resampled from a recorded workload."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from preble.core.types import pack_tokens
from preble.errors import ConfigError
from preble.lab.workloads import Segment, Workload, WorkloadRequest, make_workload, packed_prompt, resample, write_trace
from preble.lab.workloads.popularity import Popularity
from support.shared_data import DATA, needs_data

SYSTEM = Segment("system", tokens=pack_tokens([1, 2, 3]))


def question(number: int, group: str | None, tokens: list[int] | None = None) -> WorkloadRequest:
    """A request about `group`, with tokens of its own."""
    own = Segment(tokens=pack_tokens(tokens or [1000 + number]))
    about = Segment(f"about {group}", tokens=pack_tokens([100, len(group or "")]))
    return WorkloadRequest(f"q{number}", (SYSTEM, about, own), 5, arrival_s=float(number), group=group)


def recorded() -> Workload:
    """Six requests about a, three about bb, one about ccc."""
    names = ["a", "bb", "a", "ccc", "a", "bb", "a", "a", "bb", "a"]
    return Workload("recorded", tuple(question(i, name) for i, name in enumerate(names)), "written by hand")


def conversation(number: int) -> list[WorkloadRequest]:
    """Two turns, the second one's prompt begins with the first one's."""
    said = [Segment(f"c{number}-{i}", tokens=pack_tokens([number * 10 + i])) for i in range(3)]
    first = WorkloadRequest(f"c{number}.0", (SYSTEM, said[0]), 1, 0.0, session=f"c{number}", group="all")
    prompt = (SYSTEM, *said)
    second = WorkloadRequest(f"c{number}.1", prompt, 2, session=f"c{number}", parent=first.request_id, delay_s=1.5)
    return [first, second]


def groups(workload: Workload) -> Counter[str | None]:
    return Counter(request.group for request in workload.requests)


def test_recorded_popularity_draws_everything_once_before_anything_twice() -> None:
    once = resample(recorded(), 10, seed=1)
    assert sorted(r.request_id for r in once.requests) == [f"q{i}" for i in range(10)]
    assert [r.request_id for r in once.requests] != [f"q{i}" for i in range(10)], "in another order"
    assert groups(resample(recorded(), 30, seed=1)) == {"a": 18, "bb": 9, "ccc": 3}


def test_what_is_drawn_has_no_times() -> None:
    assert all(request.arrival_s is None for request in resample(recorded(), 30, seed=1).requests)


def test_the_same_seed_draws_the_same() -> None:
    assert resample(recorded(), 25, seed=1) == resample(recorded(), 25, seed=1)
    assert resample(recorded(), 25, seed=1) != resample(recorded(), 25, seed=2)


def test_uniform_and_zipf_draw_by_group() -> None:
    uniform = groups(resample(recorded(), 3000, 1, popularity=Popularity("uniform")))
    assert max(uniform.values()) < 1.15 * min(uniform.values())
    zipf = groups(resample(recorded(), 3000, 1, popularity=Popularity("zipf", 1.0)))
    assert [name for name, _ in zipf.most_common()] == ["a", "bb", "ccc"], "by how often they were requested"
    assert zipf["a"] / zipf["ccc"] == pytest.approx(3, rel=0.15)


def test_only_the_most_requested_groups_are_kept() -> None:
    assert groups(resample(recorded(), 9, 1, num_prefixes=2)) == {"a": 6, "bb": 3}


def test_a_request_drawn_again_shares_what_it_shared_and_nothing_else() -> None:
    drawn = resample(recorded(), 30, seed=1).requests
    first, second, third = (next(r for r in drawn if r.request_id == name) for name in ("q3", "q3~2", "q3~3"))
    assert first.segments[:2] == second.segments[:2] == third.segments[:2]
    assert first.segments[2] == second.segments[3] == third.segments[3]
    assert len({packed_prompt(request)[5 * 4 :][:4] for request in (first, second, third)}) == 3
    assert len({packed_prompt(request) for request in drawn}) == 30


def test_a_text_drawn_again_gets_letters_of_its_own() -> None:
    parts = (Segment("s", text="Be brief.\n"), Segment(text="Why?"))
    twice = resample(Workload("text", (WorkloadRequest("q", parts, 3),)), 2, seed=0)
    assert [request.prompt() for request in twice.requests] == ["Be brief.\nWhy?", "Be brief.\n[q~2]\nWhy?"]


def test_sessions_are_drawn_whole_and_the_last_is_cut() -> None:
    workload = Workload("chat", tuple(request for number in range(1, 4) for request in conversation(number)))
    drawn = resample(workload, 11, seed=3)
    assert [request.request_id.split(".")[1][0] for request in drawn.requests] == list("01" * 5 + "0")
    for parent, child in zip(drawn.requests[::2], drawn.requests[1::2], strict=False):
        assert (child.parent, child.session, child.delay_s) == (parent.request_id, parent.session, 1.5)
        assert child.segments[: len(parent.segments)] == parent.segments
    assert len({packed_prompt(request) for request in drawn.openers}) == 6


@pytest.mark.parametrize(
    ("num_requests", "num_prefixes", "says"),
    [(10, 4, "workload 'recorded' has 3 prefixes, not 4"), (0, None, "at least"), (5, 0, "at least")],
)
def test_what_cannot_be_drawn_is_refused(num_requests: int, num_prefixes: int | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resample(recorded(), num_requests, 0, num_prefixes=num_prefixes)


def test_a_workload_without_groups_has_no_popularity_but_its_own() -> None:
    workload = Workload("plain", (question(0, None), question(1, None)))
    with pytest.raises(ConfigError, match="request 'q0' of workload 'plain' has no group"):
        resample(workload, 2, 0, popularity=Popularity("uniform"))
    assert len(resample(workload, 5, 0).requests) == 5


def test_a_file_is_taken_as_it_is_unless_popularity_or_prefixes_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, recorded())
    assert len(make_workload(str(path), 4, seed=9).requests) == 4
    assert len(make_workload(str(path), None, 9, popularity="recorded").requests) == 10
    assert len(make_workload(str(path), 40, 9, popularity="uniform").requests) == 40
    assert groups(make_workload(str(path), None, 9, num_prefixes=1)) == {"a": 10}


@needs_data
def test_recorded_workloads_keep_their_prefixes_when_they_are_resampled() -> None:
    path = str(DATA / "workloads" / "video.requests.jsonl.gz")
    recorded_groups = groups(make_workload(path, None, 0))
    drawn = make_workload(path, 2000, 4, popularity="zipf", num_prefixes=100)
    assert groups(drawn).keys() <= {name for name, _ in recorded_groups.most_common(100)}
    assert len({packed_prompt(request) for request in drawn.requests[:500]}) == 500


@needs_data
@pytest.mark.parametrize("name", ["agent", "multiturn"])
def test_recorded_sessions_stay_closed_loops_when_they_are_drawn_twice(name: str) -> None:
    path = str(DATA / "workloads" / f"{name}.requests.jsonl.gz")
    whole = len(make_workload(path, None, 0).requests)
    requests = {r.request_id: r for r in make_workload(path, whole + 200, 1, popularity="recorded").requests}
    again = [request for request in requests.values() if request.request_id.endswith("~2")]
    assert len(again) == 200
    for child in again:
        if child.parent is not None:
            assert packed_prompt(child).startswith(packed_prompt(requests[child.parent]))
