from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from preble.errors import ConfigError, TraceFormatError
from preble.lab.workloads import LoadOptions, make_workload, packed_prompt, read_trace, write_trace
from preble.lab.workloads.loaders import format_names
from preble.lab.workloads.loaders.mooncake import spread_ticks
from support.traces import (
    CHAT,
    TALK,
    arrivals,
    assert_children_continue,
    common,
    file_of,
    lengths,
    loaded,
    refusal,
    tokens,
)

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE_LINES = [
    AZURE,
    "2023-11-16 18:17:03.9799600,4808,10",
    "2023-11-16 18:17:04.0319600,3180,8",
    "2023-11-16 18:17:06.9799600,110,0",
]
MOONCAKE_LINES = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]},
    {"timestamp": 1000, "input_length": 1024, "output_length": 20, "hash_ids": [0, 1]},
    {"timestamp": 4000, "input_length": 600, "output_length": 0, "hash_ids": [0, 7]},
]
SERVEGEN_LINES = [
    {"timestamp": 0.5, "client": 3, "input_length": 100, "output_length": 4},
    {"timestamp": 2000.5, "client": 3, "input_length": 300, "output_length": 5},
    {"timestamp": 2500.5, "client": 3, "input_length": 40, "output_length": 5},
    {"timestamp": 3000.5, "client": "b", "input_length": 100, "output_length": 6},
]
# ---- any format ----------------------------------------------------------------------------------------------------

PAIR = [{"id": "q", "segs": ["tool"], "n_in": 5, "n_out": 2}]
ONE_OF_EACH = {
    "preble": [
        {"kind": "trace", "version": 1, "name": "t"},
        {"kind": "request", "id": "a", "text": "x", "output_tokens": 1},
    ],
    "azure": AZURE_LINES,
    "mooncake": MOONCAKE_LINES,
    "servegen": SERVEGEN_LINES,
    "segments": PAIR,
    "sharegpt": [{"conversations": TALK}],
    "openai": [CHAT],
}


def one_of(folder: Path, name: str) -> Path:
    file_of(folder, [{"id": "tool", "n_tok": 5}], "day.segments.jsonl")
    return file_of(folder, ONE_OF_EACH[name], "day.requests.jsonl")


def test_there_is_a_test_of_every_format() -> None:
    assert set(ONE_OF_EACH) == set(format_names())


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_format_is_known_by_the_content(tmp_path: Path, name: str) -> None:
    path = one_of(tmp_path, name)
    assert read_trace(path) == read_trace(path, format=name)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_compressed_file_is_read_whatever_its_name(tmp_path: Path, name: str) -> None:
    path = one_of(tmp_path, name)
    plain = read_trace(path)
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert read_trace(path) == plain


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_what_is_loaded_can_be_written_as_a_trace_and_read_back(tmp_path: Path, name: str) -> None:
    workload = read_trace(one_of(tmp_path, name))
    write_trace(tmp_path / "copy.jsonl.gz", workload)
    copy = read_trace(tmp_path / "copy.jsonl.gz")
    assert [packed_prompt(request) for request in copy.requests] == [packed_prompt(r) for r in workload.requests]
    assert [(r.request_id, r.parent, r.arrival_s) for r in copy.requests] == [
        (r.request_id, r.parent, r.arrival_s) for r in workload.requests
    ]


@pytest.mark.parametrize("name", ["azure", "mooncake", "servegen", "openai", "sharegpt"])
def test_a_byte_order_mark_and_empty_lines_do_no_harm(tmp_path: Path, name: str) -> None:
    path = one_of(tmp_path, name)
    plain = [request.prompt() for request in read_trace(path).requests]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\n  \n")
    assert [request.prompt() for request in read_trace(path).requests] == plain


def test_a_named_workload_may_be_any_of_these_files(tmp_path: Path) -> None:
    assert len(make_workload(str(one_of(tmp_path, "azure")), 2, seed=0).requests) == 2


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], ": the file is empty"),
        (["time,words", "1,2"], ":1: no known format begins with 'time,words'"),
        ([{"when": 1}], """:1: no known format begins with '{"when": 1}'"""),
        (["{"], ":1: no known format begins with '{'"),
    ],
)
def test_a_file_of_no_known_format_is_refused_with_what_is_known(
    tmp_path: Path, lines: list[object], says: str
) -> None:
    message = refusal(tmp_path, *lines)
    assert message.startswith(says)
    if lines:
        assert all(name in message for name in format_names())


def test_a_format_that_is_not_known_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'azur' is not known; choose one of preble, azure, .*openai"):
        read_trace(tmp_path / "x", format="azur")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize("option", [{"client_share": 1.5}, {"default_output_tokens": 0}])
def test_an_option_that_cannot_be_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        LoadOptions(**option)


# ---- azure ---------------------------------------------------------------------------------------------------------


def test_azure_has_lengths_and_times_from_the_first(tmp_path: Path) -> None:
    workload = loaded(tmp_path, *AZURE_LINES)
    assert lengths(workload) == [(4808, 10), (3180, 8), (110, 1)]
    assert arrivals(workload) == [0.0, 0.052, 3.0]
    assert "share nothing" in workload.note


def test_azure_prompts_share_nothing(tmp_path: Path) -> None:
    first, second, third = loaded(tmp_path, *AZURE_LINES).requests
    assert max(common(first, second), common(first, third), common(second, third)) <= 2  # by chance, of 1,000 ids


def test_azure_of_2024_has_a_zone_and_may_be_out_of_order(tmp_path: Path) -> None:
    rows = ["2024-05-10 00:00:01.000000+00:00,7,3", "2024-05-10 00:00:00.009930+00:00,5,2"]
    workload = loaded(tmp_path, AZURE, *rows)
    assert lengths(workload) == [(5, 2), (7, 3)]
    assert arrivals(workload) == [0.0, 0.9901]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("2023-11-16 18:17:04,31x,8", ":2: '2023-11-16 18:17:04,31x,8': invalid literal"),
        ("2023-11-16 18:17:04,31", ":2: "),
        ("yesterday,31,8", "Invalid isoformat"),
        ("2023-11-16 18:17:04,0,8", "at least one token"),
        ("2023-11-16 18:17:04,1,-8", "not fewer than none"),
        ("2023-11-16 18:17:04,4,808,10", "4 cells for 3 columns"),
        ("2023-11-16 18:17:04,10000001,8", "at most 10000000 tokens"),
    ],
)
def test_a_bad_row_of_azure_is_named(tmp_path: Path, row: str, says: str) -> None:
    message = refusal(tmp_path, AZURE, row)
    assert message.startswith(":2: ")
    assert says in message
    assert "a line looks like 2023-11-16" in message


def test_an_azure_file_without_one_of_its_columns_is_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path, ["TIMESTAMP,ContextTokens"])
    with pytest.raises(TraceFormatError, match=":1: column GeneratedTokens is missing"):
        read_trace(path, format="azure")


def test_an_azure_file_without_a_request_is_refused(tmp_path: Path) -> None:
    assert "there is no request in it" in refusal(tmp_path, AZURE)


# ---- mooncake ------------------------------------------------------------------------------------------------------


def test_mooncake_prompts_with_equal_leading_hashes_share_those_blocks(tmp_path: Path) -> None:
    first, second, third = loaded(tmp_path, *MOONCAKE_LINES).requests
    assert [len(tokens(request)) for request in (first, second, third)] == [1100, 1024, 600]
    assert common(first, second) == 1024
    assert 512 <= common(first, third) <= 514
    assert first.segments[0] is third.segments[0]


@pytest.mark.parametrize("size", [16, 24, 256, 1024])
def test_mooncake_blocks_may_have_any_size_that_fits_every_line(tmp_path: Path, size: int) -> None:
    lengths = (size * 5 + 1, size * 3, size * 7 - 1, size * 40)
    lines = [
        {"timestamp": 0, "input_length": n, "output_length": 1, "hash_ids": list(range(-(-n // size)))} for n in lengths
    ]
    workload = loaded(tmp_path, *lines)
    assert f"blocks of {size} tokens" in workload.note
    assert [len(tokens(request)) for request in workload.requests] == list(lengths)
    assert common(workload.requests[0], workload.requests[1]) == 3 * size


def test_a_file_with_a_column_called_kind_need_not_be_ours(tmp_path: Path) -> None:
    table = file_of(tmp_path, [f"kind,{AZURE}", *(f"chat,{line}" for line in AZURE_LINES[1:])], "table.csv")
    assert len(read_trace(table).requests) == 3
    log = file_of(tmp_path, [CHAT | {"kind": "request"}], "log.jsonl")
    assert read_trace(log).requests[0].prompt() == loaded(tmp_path, CHAT).requests[0].prompt()


def test_of_a_longer_file_each_seed_takes_another_stretch(tmp_path: Path) -> None:
    stamps = [f"2023-11-16 18:{minute:02}:00.0,{100 + minute},8" for minute in range(60)]
    path = str(file_of(tmp_path, [AZURE, *stamps], "azure.csv"))
    taken = [make_workload(path, 10, seed) for seed in range(8)]
    starts = {len(tokens(workload.requests[0])) for workload in taken}
    assert len(starts) > 4
    for workload in taken:
        lengths_of = [len(tokens(request)) for request in workload.requests]
        assert lengths_of == list(range(lengths_of[0], lengths_of[0] + 10))
        assert arrivals(workload) == [60.0 * i for i in range(10)]
    assert make_workload(path, 10, 3) == taken[3]
    assert make_workload(path, None, 3) == read_trace(Path(path))


def test_a_cut_block_is_the_beginning_of_the_whole_one(tmp_path: Path) -> None:
    cut = {"timestamp": 0, "input_length": 300, "output_length": 1, "hash_ids": [0]}
    whole, part = loaded(tmp_path, MOONCAKE_LINES[0], MOONCAKE_LINES[0] | cut).requests[::-1]
    assert common(whole, part) == 300


def test_mooncake_ticks_are_spread_unless_told_otherwise(tmp_path: Path) -> None:
    assert arrivals(loaded(tmp_path, *MOONCAKE_LINES)) == [0.0, 1.5, 3.0]
    assert arrivals(loaded(tmp_path, *MOONCAKE_LINES, spread_ticks=False)) == [0.0, 0.0, 3.0]


def test_requests_that_all_come_in_one_tick_stay_a_burst() -> None:
    assert spread_ticks([2.0, 2.0]) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"hash_ids": [0, 1]},
            "2 hash_ids for 1100 tokens; there must be one for each block, and in the lines before ",
        ),
        ({"hash_ids": "x"}, "Expected `array`"),
        ({"input_length": 0}, "input_length"),
        ({"timestamp": -1}, "timestamp"),
        ({"output_length": None}, "output_length"),
    ],
)
def test_a_bad_line_of_mooncake_is_named(tmp_path: Path, change: dict[str, object], says: str) -> None:
    message = refusal(tmp_path, MOONCAKE_LINES[0], MOONCAKE_LINES[0] | change)
    assert message.startswith(":2: ")
    assert says in message


# ---- servegen ------------------------------------------------------------------------------------------------------


def test_requests_of_one_client_share_its_system_prompt(tmp_path: Path) -> None:
    workload = loaded(tmp_path, *SERVEGEN_LINES)
    first, second, short, other = workload.requests
    assert lengths(workload) == [(100, 4), (300, 5), (40, 5), (100, 6)]
    assert 50 <= common(first, second) <= 52  # half of the median of 40, 100 and 300; then by chance
    assert 39 <= common(first, short) <= 40  # all but its own token
    assert common(first, other) <= 2
    assert [first.group, other.group] == ["day:client:3", "day:client:b"]
    assert arrivals(workload) == [0.0, 2.0, 2.5, 3.0]


def test_the_share_of_a_clients_system_prompt_can_be_chosen(tmp_path: Path) -> None:
    first, second, *_ = loaded(tmp_path, *SERVEGEN_LINES, client_share=0.0).requests
    assert common(first, second) <= 2
    first, second, *_ = loaded(tmp_path, *SERVEGEN_LINES, client_share=1.0).requests
    assert 99 <= common(first, second) <= 100


@pytest.mark.parametrize(
    "change", [{"client": None}, {"input_length": 1.5}, {"input_length": 10**12}, {"timestamp": "now"}]
)
def test_a_bad_line_of_servegen_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    message = refusal(tmp_path, SERVEGEN_LINES[0], SERVEGEN_LINES[1] | change)
    assert message.startswith(":2: ")
    assert next(iter(change)) in message


# ---- segments ------------------------------------------------------------------------------------------------------

SEGMENTS: list[dict[str, Any]] = [
    {"id": "system", "n_tok": 20, "text": "Be brief.\n"},
    {"id": "m1", "n_tok": 8, "text": "user: Why?\n"},
    {"id": "m2", "n_tok": 7, "text": "assistant: Because it is.\n"},
    {"id": "m3", "n_tok": 9, "text": "user: Really?\n"},
    {"id": "video", "n_tok": 400, "text": None},
]
TURN_1: dict[str, Any] = {
    "id": "a-0",
    "segs": ["system", "m1"],
    "tail": "assistant:",
    "n_in": 30,
    "n_out": 4,
    "session": "a",
    "step": 0,
    "parent": None,
}
TURN_2 = TURN_1 | {"id": "a-1", "segs": ["system", "m1", "m2", "m3"], "n_in": 46, "step": 1, "parent": "a-0"}
FILM = {"id": "film", "segs": ["system", "video"], "tail": " What happens?", "n_in": 423, "n_out": 3}


def pair_of(folder: Path, *requests: object, segments: Iterable[object] = SEGMENTS, name: str = "day") -> Path:
    file_of(folder, segments, f"{name}.segments.jsonl")
    return file_of(folder, requests, f"{name}.requests.jsonl")


def test_a_pair_of_files_has_exactly_the_tokens_that_it_counts(tmp_path: Path) -> None:
    workload = read_trace(pair_of(tmp_path, TURN_1, TURN_2, FILM))
    assert workload.name == "day"
    assert lengths(workload) == [(30, 4), (46, 4), (423, 3)]
    assert [request.group for request in workload.requests] == ["day:system", "day:system", "day:video"]
    first, second, film = workload.requests
    assert first.segments[0] is second.segments[0] is film.segments[0]


def test_a_child_begins_with_its_parents_prompt_then_has_the_answer(tmp_path: Path) -> None:
    """The parent's tail, "assistant:", is the beginning of the answer in the child."""
    workload = read_trace(pair_of(tmp_path, TURN_1, TURN_2))
    assert assert_children_continue(workload) == 1
    assert [(r.session, r.parent) for r in workload.requests] == [("a", None), ("a", "a-0")]


def test_tails_that_nothing_continues_are_unique(tmp_path: Path) -> None:
    """The same question twice is two questions: whether a cache has it is not what the file says."""
    first, second = read_trace(pair_of(tmp_path, FILM, FILM | {"id": "again"})).requests
    assert 420 <= common(first, second) <= 421


def test_texts_can_be_had_instead_of_tokens(tmp_path: Path) -> None:
    path = pair_of(tmp_path, TURN_1, TURN_2)
    workload = read_trace(path, options=LoadOptions(text=True))
    assert workload.requests[1].prompt() == (
        "Be brief.\nuser: Why?\nassistant: Because it is.\nuser: Really?\nassistant:"
    )
    assert assert_children_continue(workload) == 1


def test_segments_of_two_pairs_are_distinguished(tmp_path: Path) -> None:
    days = [read_trace(pair_of(tmp_path, FILM, name=name)).requests[0] for name in ("monday", "tuesday")]
    assert common(*days) <= 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (TURN_2, "request 'a-1': parent 'a-0' is not a request above"),
        (TURN_1 | {"segs": ["sytem"]}, "segment 'sytem' is not in the segments file"),
        (TURN_1 | {"n_in": 27}, "its segments have 28 tokens, more than the n_in of 27"),
        (TURN_1 | {"n_out": -1}, "n_out"),
        (TURN_1 | {"segs": "system"}, "segs"),
    ],
)
def test_a_bad_request_of_a_pair_is_named(tmp_path: Path, line: dict[str, Any], says: str) -> None:
    with pytest.raises(TraceFormatError, match=r"day\.requests\.jsonl:2: ") as caught:
        read_trace(pair_of(tmp_path, FILM, line))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"segs": ["system", "m2", "m1", "m3"]}, "does not begin with that of its parent 'a-0'"),
        ({"segs": ["system", "m1", "m3"]}, "does not begin with that of its parent 'a-0'"),
        ({"session": "b"}, "parent 'a-0' is of session 'a', not 'b'"),
        ({"id": "a-0"}, "it is there twice"),
    ],
)
def test_a_turn_that_does_not_continue_its_parent_is_named(
    tmp_path: Path, change: dict[str, object], says: str
) -> None:
    with pytest.raises(TraceFormatError, match=r"day\.requests\.jsonl:2: ") as caught:
        read_trace(pair_of(tmp_path, TURN_1, TURN_2 | change))
    assert says in str(caught.value)


def test_a_segment_without_text_cannot_be_had_as_text(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match=r":1: request 'film': segment 'video' has no text"):
        read_trace(pair_of(tmp_path, FILM), options=LoadOptions(text=True))


def test_segments_that_are_missing_or_there_twice_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match=r"day\.segments\.jsonl:6: segment 'system' is there twice"):
        read_trace(pair_of(tmp_path, FILM, segments=[*SEGMENTS, SEGMENTS[0]]))
    (tmp_path / "day.segments.jsonl").unlink()
    with pytest.raises(TraceFormatError, match=r"put day\.segments\.jsonl or day\.segments\.jsonl\.gz beside it"):
        read_trace(tmp_path / "day.requests.jsonl")


@pytest.mark.parametrize("line", [FILM, SEGMENTS[0]])
def test_a_pair_is_named_by_its_file_of_requests(tmp_path: Path, line: object) -> None:
    with pytest.raises(TraceFormatError, match=r"give a file of requests called NAME\.requests\.jsonl"):
        read_trace(file_of(tmp_path, [line], "film.jsonl"))
