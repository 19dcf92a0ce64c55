from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preble.core.types import pack_tokens
from preble.errors import ConfigError, TraceFormatError
from preble.lab.workloads import Segment, Workload, WorkloadRequest, make_workload, read_trace, write_trace
from preble.lab.workloads.trace import made_up_tokens, own_tokens

HEADER = {"kind": "trace", "version": 1, "name": "t"}
SYSTEM = {"kind": "segment", "id": "sys", "text": "Be brief. "}
FIRST = {"kind": "request", "id": "a", "output_tokens": 4, "segments": ["sys"], "text": "Why?"}


def trace_of(folder: Path, *lines: dict[str, Any] | str, name: str = "t.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_prompt_is_its_segments_then_its_own_text(tmp_path: Path) -> None:
    workload = read_trace(trace_of(tmp_path, HEADER, SYSTEM, FIRST))
    assert [request.prompt() for request in workload.requests] == ["Be brief. Why?"]


def test_requests_share_their_segments_in_memory(tmp_path: Path) -> None:
    workload = read_trace(trace_of(tmp_path, HEADER, SYSTEM, FIRST, FIRST | {"id": "b"}))
    assert workload.requests[0].segments[0] is workload.requests[1].segments[0]


def test_token_ids_make_a_prompt_of_token_ids(tmp_path: Path) -> None:
    segment = {"kind": "segment", "id": "s", "token_ids": [5, 6]}
    request = {"kind": "request", "id": "a", "output_tokens": 1, "segments": ["s"], "token_ids": [7]}
    assert read_trace(trace_of(tmp_path, HEADER, segment, request)).requests[0].prompt() == [5, 6, 7]


def test_num_tokens_stands_for_the_same_made_up_tokens_every_time(tmp_path: Path) -> None:
    segments = [{"kind": "segment", "id": name, "num_tokens": 50} for name in ("v", "w")]
    requests = [{"kind": "request", "id": n, "output_tokens": 1, "segments": [n]} for n in ("v", "w")]
    path = trace_of(tmp_path, HEADER, *segments, *requests)
    prompts = [request.prompt() for request in read_trace(path).requests]
    assert [len(prompt) for prompt in prompts] == [50, 50]
    assert prompts[0] != prompts[1]
    assert prompts == [request.prompt() for request in read_trace(path).requests]


def test_a_requests_own_num_tokens_are_unlike_those_of_any_other(tmp_path: Path) -> None:
    requests = [{"kind": "request", "id": n, "output_tokens": 1, "num_tokens": 50} for n in ("a", "b")]
    path = trace_of(tmp_path, HEADER, *requests)
    prompts = [request.prompt() for request in read_trace(path).requests]
    assert [len(prompt) for prompt in prompts] == [50, 50]
    assert prompts[0] != prompts[1]


def test_made_up_tokens_are_written_as_their_number(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    segments = (Segment("video", tokens=made_up_tokens("video", 900)), Segment(tokens=own_tokens("a", 70)))
    workload = Workload("w", (WorkloadRequest("a", segments, 1),))
    write_trace(path, workload)
    assert [line.get("num_tokens") for line in map(json.loads, path.read_text().splitlines())] == [None, 900, 70]
    assert read_trace(path) == workload


def test_a_piece_without_an_id_before_one_with_an_id_keeps_its_place(tmp_path: Path) -> None:
    segments = (Segment(text="first "), Segment("s", text="second "), Segment(text="third"))
    write_trace(tmp_path / "w.jsonl", Workload("w", (WorkloadRequest("a", segments, 1),)))
    assert read_trace(tmp_path / "w.jsonl").requests[0].prompt() == "first second third"


def test_two_segments_of_one_id_are_not_written(tmp_path: Path) -> None:
    requests = tuple(WorkloadRequest(text, (Segment("s", text=text),), 1) for text in ("a", "b"))
    with pytest.raises(ValueError, match="two different segments have the id 's'"):
        write_trace(tmp_path / "w.jsonl", Workload("w", requests))


def test_empty_lines_are_skipped(tmp_path: Path) -> None:
    assert len(read_trace(trace_of(tmp_path, HEADER, "", SYSTEM, "  ", FIRST)).requests) == 1


def test_a_compressed_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(trace_of(tmp_path, HEADER, SYSTEM, FIRST).read_bytes()))
    assert len(read_trace(path).requests) == 1


SESSION = {"session": "s", "arrival_s": 0.0}
CHILD = {"kind": "request", "id": "b", "output_tokens": 4, "text": "And?", "session": "s", "parent": "a"}


@pytest.mark.parametrize(
    ("lines", "place", "says"),
    [
        ([], "", "empty"),
        ([HEADER], "", "no request"),
        ([FIRST], ":1", "first line"),
        ([HEADER | {"version": 2}], ":1", "unknown version 2"),
        ([HEADER, HEADER], ":2", "second line of kind 'trace'"),
        ([HEADER, "{not json"], ":2", "malformed"),
        (
            [HEADER, '{"kind": "request", "id": "\udcff"}'.encode("utf-8", "surrogateescape").decode("latin-1")],
            ":2",
            "",
        ),
        ([HEADER, {"kind": "reqest", "id": "a"}], ":2", "reqest"),
        ([HEADER, SYSTEM, FIRST | {"ouput_tokens": 3}], ":3", "ouput_tokens"),
        ([HEADER, FIRST], ":2", "segment 'sys' is not defined above"),
        ([HEADER, SYSTEM, SYSTEM], ":3", "defined twice"),
        ([HEADER, SYSTEM, FIRST, FIRST], ":4", "occurs twice"),
        ([HEADER, SYSTEM | {"num_tokens": 3}], ":2", "exactly one of"),
        ([HEADER, {"kind": "segment", "id": "x"}], ":2", "exactly one of"),
        ([HEADER, SYSTEM, FIRST | {"output_tokens": 0}], ":3", "output_tokens"),
        ([HEADER, SYSTEM, FIRST | {"arrival_s": -1}], ":3", "arrival_s"),
        ([HEADER, SYSTEM, FIRST | {"token_ids": [1]}], ":3", "more than one of text"),
        ([HEADER, SYSTEM, FIRST | {"num_tokens": 0}], ":3", "num_tokens"),
        ([HEADER, {**FIRST, "segments": [], "text": None, "num_tokens": 10**12}], ":2", "num_tokens"),
        ([HEADER, SYSTEM, FIRST | {"output_tokens": 10**12}], ":3", "output_tokens"),
        ([HEADER, SYSTEM, {**FIRST, "text": None, "token_ids": [1]}], ":3", "mixes text and token ids"),
        ([HEADER, {**FIRST, "segments": [], "text": None}], ":2", "prompt is empty"),
        ([HEADER, {**FIRST, "segments": [], "text": None, "token_ids": [-1]}], ":2", "token_ids"),
        ([HEADER, CHILD], ":2", "not a request above"),
        ([HEADER, SYSTEM, FIRST, CHILD], ":4", "is of session None, not 's'"),
        ([HEADER, SYSTEM, FIRST | {"arrival_s": 1.0}, FIRST | {"id": "b"}], "", "request 'b' has no arrival_s"),
    ],
)
def test_a_bad_line_is_named_with_its_place_and_a_remedy(
    tmp_path: Path, lines: list[dict[str, Any] | str], place: str, says: str
) -> None:
    path = trace_of(tmp_path, *lines)
    with pytest.raises(TraceFormatError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}{place}: ")
    assert says in str(caught.value)


def test_bytes_that_are_not_utf8_are_named_with_their_line(tmp_path: Path) -> None:
    path = trace_of(tmp_path, HEADER, SYSTEM)
    path.write_bytes(path.read_bytes() + b'{"kind": "request", "id": "\xff", "output_tokens": 1}\n')
    with pytest.raises(TraceFormatError, match=r"t\.jsonl:3: "):
        read_trace(path)


def test_a_file_that_is_not_there_is_a_trace_error(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")


def test_a_truncated_compressed_file_is_a_trace_error(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(HEADER).encode() * 100)[:40])
    with pytest.raises(TraceFormatError, match="cannot be read"):
        read_trace(path)


def test_a_child_needs_no_arrival_time(tmp_path: Path) -> None:
    workload = read_trace(trace_of(tmp_path, HEADER, SYSTEM, FIRST | SESSION, CHILD))
    assert workload.has_arrivals
    assert [request.request_id for request in workload.openers] == ["a"]


def segments() -> st.SearchStrategy[Segment]:
    texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
    return st.builds(lambda text: Segment(f"id-{text}", text=text), texts)


@given(
    st.lists(
        st.tuples(st.lists(segments(), max_size=3), st.text(st.characters(codec="utf-8"), min_size=1, max_size=9)),
        min_size=1,
        max_size=5,
    )
)
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, prompts: list[Any]) -> None:
    requests = tuple(
        WorkloadRequest(f"r{i}", (*shared, Segment(text=own)), 3, arrival_s=float(i), group="g")
        for i, (shared, own) in enumerate(prompts)
    )
    workload = Workload("w", requests, note="n")
    path = tmp_path_factory.mktemp("trace") / "w.jsonl.gz"
    write_trace(path, workload)
    assert read_trace(path) == workload


def test_token_prompts_and_sessions_are_read_back_too(tmp_path: Path) -> None:
    shared = Segment("s", tokens=pack_tokens([1, 2]))
    opener = WorkloadRequest("a", (shared, Segment(tokens=pack_tokens([3]))), 1, session="x")
    child = WorkloadRequest("b", (shared,), 1, session="x", parent="a", delay_s=0.5)
    workload = Workload("w", (opener, child))
    write_trace(tmp_path / "w.jsonl", workload)
    assert read_trace(tmp_path / "w.jsonl") == workload


def test_only_openers_get_arrival_times(tmp_path: Path) -> None:
    workload = read_trace(trace_of(tmp_path, HEADER, SYSTEM, FIRST | {"session": "s"}, CHILD)).with_arrivals([2.5])
    assert [request.arrival_s for request in workload.requests] == [2.5, None]
    with pytest.raises(ValueError, match="1 requests need an arrival time, got 2"):
        workload.with_arrivals([0.0, 1.0])


def test_asking_for_more_requests_than_a_file_has_is_refused(tmp_path: Path) -> None:
    path = trace_of(tmp_path, HEADER, SYSTEM, FIRST)
    assert len(make_workload(str(path), 1, seed=0).requests) == 1
    with pytest.raises(ConfigError, match="has 1 requests, fewer than 2"):
        make_workload(str(path), 2, seed=0)


def test_the_example_of_the_reference_page_is_a_trace(tmp_path: Path) -> None:
    page = (Path(__file__).parents[4] / "docs" / "reference" / "trace-format.md").read_text(encoding="utf-8")
    example = page.split("```json\n")[1].split("```")[0]
    workload = read_trace(trace_of(tmp_path, *example.splitlines()))
    assert [request.arrival_s for request in workload.requests] == [0.0, 0.4]
