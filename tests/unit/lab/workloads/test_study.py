"""The study of a workload: every number by hand on a small one, and against a naive reading of the definitions."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from math import sqrt
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preble.core.types import PackedTokens, pack_tokens
from preble.errors import ConfigError
from preble.lab.workloads import Segment, Workload, WorkloadRequest
from preble.lab.workloads.study import (
    StudyReport,
    distribution,
    draw_cdf,
    study,
    study_arrivals,
    study_page,
    study_sessions,
    study_sharing,
    summary_tables,
)
from preble.lab.workloads.study.metrics import GAP, PROMPT
from preble.lab.workloads.study.tables import arrivals_table, sessions_table
from support.pages import PageReader

SYSTEM = Segment("system", tokens=pack_tokens([1, 2]))
TOOL_A = Segment("a", tokens=pack_tokens(range(10, 16)))
TOOL_B = Segment("b", tokens=pack_tokens(range(20, 25)))


def own(*token_ids: int) -> Segment:
    return Segment(tokens=pack_tokens(token_ids))


REQUESTS = (
    WorkloadRequest("0", (SYSTEM, TOOL_A, own(90, 91)), 5, arrival_s=0.0),
    WorkloadRequest("1", (SYSTEM, TOOL_A, own(92)), 3, arrival_s=1.0),
    WorkloadRequest("2", (SYSTEM, TOOL_B, own(93)), 4, arrival_s=3.0),
    WorkloadRequest("3", (SYSTEM, own(*range(30, 40))), 6, arrival_s=30.0),
    WorkloadRequest("4", (SYSTEM, TOOL_A, own(90, 91)), 2, arrival_s=31.0),
    WorkloadRequest("5", (SYSTEM, TOOL_B, own(94)), 4, arrival_s=31.0),
)
"""The tree: system (2 tokens), below it A (6), B (5) and the 10 of request 3; tails of 2, 1, 1 and 1 below A and B."""

WORKLOAD = Workload("small", REQUESTS, "made by hand")


def test_lengths_and_their_ratio() -> None:
    result = study(WORKLOAD)
    assert (result.name, result.requests, result.has_text) == ("small", 6, False)
    assert result.prompt_tokens == distribution([10, 9, 8, 12, 10, 8])
    assert result.output_tokens.mean == 4.0
    assert result.prompt_to_output == distribution([2.0, 3.0, 2.0, 2.0, 5.0, 2.0])


def test_what_an_earlier_prompt_began_with_is_shared() -> None:
    sharing = study(WORKLOAD).sharing
    assert sharing.fraction == distribution([0 / 10, 8 / 9, 2 / 8, 2 / 12, 10 / 10, 7 / 8])
    assert (sharing.prompt_tokens, sharing.distinct_tokens) == (57, 28)
    assert sharing.hit_rate == 29 / 57
    assert sharing.mostly_shared == 3 / 6


def test_the_key_portion_is_the_deepest_node_longer_than_all_before_it() -> None:
    portions = study(WORKLOAD).sharing.key_portions
    assert portions.fraction == distribution([6 / 10, 6 / 9, 5 / 8, 10 / 12, 6 / 10, 5 / 8])
    assert (portions.nodes, portions.requests.mean, portions.requests.sd) == (3, 2.0, pytest.approx(sqrt(2 / 3)))


def test_a_node_as_long_as_all_before_it_is_no_key_portion() -> None:
    prompts = [pack_tokens(ids) for ids in ([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 7, 8, 9])]
    assert study_sharing(prompts).key_portions.fraction == distribution([2 / 4, 2 / 4, 3 / 5])


def test_a_prompt_that_ends_inside_another_one_is_a_node_of_its_own() -> None:
    prompts = [pack_tokens([1, 2, 3, 4, 5]), pack_tokens([1, 2])]
    sharing = study_sharing(prompts)
    assert sharing.fraction == distribution([0.0, 1.0])
    assert sharing.key_portions.fraction == distribution([3 / 5, 1.0])


def naive_shared(first: list[int], second: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))  # noqa: B905


def naive_key_portion(prompt: list[int], others: list[list[int]]) -> tuple[int, int]:
    """(start, end) of the key portion: nodes end where any prompt parts from this one, or where it ends itself."""
    ends = sorted({naive_shared(prompt, other) for other in others} - {0} | {len(prompt)})
    nodes = zip([0, *ends], ends, strict=False)
    return [(start, end) for start, end in nodes if end - start > start][-1]


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


@given(PROMPTS)
def test_sharing_is_what_the_definitions_say(prompts: list[list[int]]) -> None:
    seen = [
        max((naive_shared(prompt, earlier) for earlier in prompts[:place]), default=0)
        for place, prompt in enumerate(prompts)
    ]
    spans = [naive_key_portion(prompt, prompts) for prompt in prompts]
    sharers = Counter(tuple(prompt[:end]) for prompt, (_, end) in zip(prompts, spans, strict=True))
    sharing = study_sharing(map(pack_tokens, prompts))
    assert sharing.fraction == distribution([s / len(prompt) for s, prompt in zip(seen, prompts, strict=True)])
    assert sharing.distinct_tokens == sum(map(len, prompts)) - sum(seen)
    assert sharing.key_portions.nodes == len(sharers)
    assert sharing.key_portions.requests == distribution(list(sharers.values()))
    assert sharing.key_portions.fraction == distribution(
        [(end - start) / len(prompt) for prompt, (start, end) in zip(prompts, spans, strict=True)]
    )


@given(PROMPTS, st.randoms(use_true_random=False))
def test_the_order_of_requests_changes_no_total(prompts: list[list[int]], rng: random.Random) -> None:
    before = study_sharing(map(pack_tokens, prompts))
    rng.shuffle(prompts)
    after = study_sharing(map(pack_tokens, prompts))
    assert (after.hit_rate, after.distinct_tokens) == (before.hit_rate, before.distinct_tokens)
    assert after.key_portions.nodes == before.key_portions.nodes
    assert after.key_portions.fraction.mean == pytest.approx(before.key_portions.fraction.mean)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt number 1"):
        study_sharing([pack_tokens([1]), PackedTokens(b"")])


def test_a_workload_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="'none' has no request"):
        study(Workload("none", ()))


def test_a_distribution_has_every_percentile() -> None:
    spread = distribution(range(101))
    assert spread.percentiles == pytest.approx(range(101))
    assert (spread.mean, spread.sd) == (fmean(range(101)), pytest.approx(pstdev(range(101))))
    with pytest.raises(ValueError, match="at least one number"):
        distribution([])


def test_arrivals_by_hand() -> None:
    arrivals = study(WORKLOAD).arrivals
    assert arrivals is not None
    assert (arrivals.requests, arrivals.duration_s) == (6, 31.0)
    assert arrivals.gap_s == distribution([1.0, 2.0, 27.0, 1.0, 0.0])
    assert arrivals.requests_per_s == pytest.approx(5 / 31)
    assert arrivals.gap_cv == pytest.approx(pstdev([1.0, 2.0, 27.0, 1.0, 0.0]) / 6.2)
    assert arrivals.peak_requests_per_s == 0.3


def test_the_peak_is_over_any_ten_seconds_without_their_end() -> None:
    arrivals = study_arrivals([15.0, 5.0, 14.0, 16.0, 6.0, 25.0])
    assert arrivals is not None and arrivals.peak_requests_per_s == 0.3


def test_what_arrives_at_once_has_no_rate() -> None:
    arrivals = study_arrivals([2.0, 2.0, 2.0])
    assert arrivals is not None
    assert (arrivals.requests_per_s, arrivals.gap_cv, arrivals.peak_requests_per_s) == (None, None, 0.3)


def test_one_arrival_is_no_arrivals() -> None:
    assert study_arrivals([1.0]) is None


SESSIONS = (
    WorkloadRequest("a", (SYSTEM,), 1, session="x"),
    WorkloadRequest("b", (SYSTEM,), 1, session="x", parent="a", delay_s=2.0),
    WorkloadRequest("c", (SYSTEM,), 1, session="x", parent="b"),
    WorkloadRequest("d", (SYSTEM,), 1, session="y"),
    WorkloadRequest("e", (SYSTEM,), 1),
)


def test_sessions_by_hand() -> None:
    sessions = study_sessions(SESSIONS, [100, 130, 200, 50, 7])
    assert sessions is not None
    assert (sessions.sessions, sessions.waiting) == (2, 2)
    assert sessions.requests == distribution([3, 1])
    assert sessions.growth_tokens == distribution([30, 70])
    assert sessions.delay_s == distribution([2.0, 0.0])


def test_sessions_in_which_nobody_waits_have_no_growth() -> None:
    sessions = study_sessions(SESSIONS[3:4], [50])
    assert sessions is not None and (sessions.growth_tokens, sessions.delay_s) == (None, None)


def test_without_sessions_there_is_nothing_to_say_of_them() -> None:
    assert study(WORKLOAD).sessions is None


def test_texts_are_counted_in_words_or_by_the_tokenizer_given() -> None:
    text = Segment("t", text="one two three\n")
    workload = Workload("text", (WorkloadRequest("0", (text,), 1), WorkloadRequest("1", (text,), 1)))
    assert study(workload).has_text
    assert study(workload).prompt_tokens.mean == 4.0
    by_letters = study(workload, tokenize=lambda request: pack_tokens(map(ord, request.prompt())))
    assert by_letters.prompt_tokens.mean == len("one two three\n")


def test_a_prompt_of_no_token_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="request '0' has no token"):
        study(WORKLOAD, tokenize=lambda request: PackedTokens(b""))


def test_progress_is_reported_after_each_request() -> None:
    told: list[int] = []
    study(WORKLOAD, on_request=lambda: told.append(1))
    assert len(told) == 6


def test_the_terminal_shows_workloads_side_by_side() -> None:
    named, *percentiles = summary_tables([study(WORKLOAD), study(WORKLOAD)])
    rows = {row[0]: row[1:] for row in named.rows}
    assert tuple(named.columns) == ("", "small", "small (2)")
    assert rows["prompt"] == ("9.50 ± 1.38",) * 2
    assert rows["requests per key portion"] == ("2 ± 0.82",) * 2
    assert rows["best hit rate"] == ("50.9 %",) * 2
    assert rows["peak 10 s"] == ("0.30/s",) * 2
    assert [table.caption for table in percentiles] == ["Prompt, tokens", "Output, tokens"]
    assert percentiles[0].rows[0] == ("small", "8", "8.25", "9.50", "10", "11.5", "11.9", "12")


def test_there_are_no_tables_of_what_no_workload_has() -> None:
    bare = study(Workload("bare", (WorkloadRequest("0", (SYSTEM,), 1),)))
    assert arrivals_table([bare]) is None and sessions_table([bare]) is None
    both = arrivals_table([bare, study(WORKLOAD)])
    assert both is not None and both.rows[0] == ("bare", *("-" for _ in both.columns[1:]))


@pytest.mark.slow
def test_the_page_has_the_tables_and_a_line_for_each_workload() -> None:
    pytest.importorskip("matplotlib", reason="the page is drawn with matplotlib (the extra `plot`)")
    session = Workload("talks", tuple(SESSIONS[:4]), "two of them")
    report = StudyReport(("small.jsonl", "talks"), None, 7, None, (study(WORKLOAD), study(session)))
    words = PageReader(study_page(report)).words
    assert words.startswith("Workload study: small, talks")
    for expected in ("50.9 %", "Sessions", "small (small.jsonl): made by hand", "Seed of named workloads: 7", "p99"):
        assert expected in words


@pytest.mark.slow
def test_a_page_leaves_out_what_no_workload_has() -> None:
    pytest.importorskip("matplotlib", reason="the page is drawn with matplotlib (the extra `plot`)")
    bare = study(Workload("bare", (WorkloadRequest("0", (SYSTEM,), 1),)))
    words = PageReader(study_page(StudyReport(("bare",), None, 0, None, (bare,)))).words
    assert "Arrivals" not in words and "Sessions" not in words


def test_what_is_zero_everywhere_is_drawn_too() -> None:
    pytest.importorskip("matplotlib", reason="the page is drawn with matplotlib (the extra `plot`)")
    at_once = Workload("burst", tuple(replace(request, arrival_s=0.0) for request in REQUESTS))
    assert "burst" in draw_cdf(GAP, [study(at_once), study(at_once)]).svg


def test_names_are_drawn_as_they_are() -> None:
    pytest.importorskip("matplotlib", reason="the page is drawn with matplotlib (the extra `plot`)")
    names = ("_hidden", "a$b", "$x^2$", "火 <b>")
    drawing = draw_cdf(PROMPT, [study(replace(WORKLOAD, name=name)) for name in names])
    legend = PageReader(drawing.svg).words.replace("\u200b", "")
    assert all(name in legend for name in names)


def test_requests_that_wait_are_no_arrivals() -> None:
    waiting = replace(REQUESTS[1], session="s", parent="0")
    first = replace(REQUESTS[0], session="s")
    arrivals = study(replace(WORKLOAD, requests=(first, waiting, *REQUESTS[2:]))).arrivals
    assert arrivals is not None and arrivals.requests == 5


def test_more_workloads_than_colours_are_distinguished_by_their_lines() -> None:
    pytest.importorskip("matplotlib", reason="the page is drawn with matplotlib (the extra `plot`)")
    drawing = draw_cdf(PROMPT, [study(WORKLOAD)] * 9)
    assert "stroke-dasharray" in drawing.svg and "small (9)" in drawing.svg
    assert "stroke-dasharray" not in draw_cdf(PROMPT, [study(WORKLOAD)] * 8).svg
