"""Loaders of files that hold text: OpenAI-style logs, ShareGPT conversations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preble.lab.workloads import WorkloadRequest
from preble.lab.workloads.loaders import read_trace
from support.traces import CHAT, TALK, WHY, arrivals, assert_children_continue, file_of, loaded, refusal, tokens

# ---- openai --------------------------------------------------------------------------------------------------------


def test_messages_become_text_by_the_documented_template(tmp_path: Path) -> None:
    body = {"messages": [{"role": "system", "content": "Be brief."}, WHY], "max_tokens": 5}
    (request,) = loaded(tmp_path, body).requests
    assert request.prompt() == "<|system|>\nBe brief.\n<|user|>\nWhy?\n<|assistant|>\n"
    assert request.output_tokens == 5


def test_tools_come_first_and_calls_after_what_was_said(tmp_path: Path) -> None:
    calls = [{"function": {"name": "look"}}]
    messages = [WHY, {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "Blue."}]
    (request,) = loaded(tmp_path, {"messages": messages, "tools": [{"name": "look"}]}).requests
    assert request.prompt() == (
        '<|tools|>\n[{"name": "look"}]\n<|user|>\nWhy?\n<|assistant|>\n[{"function": {"name": "look"}}]\n'
        "<|tool|>\nBlue.\n<|assistant|>\n"
    )


def test_parts_of_text_are_put_together(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]
    (request,) = loaded(tmp_path, {"messages": [{"role": "user", "content": parts}]}).requests
    assert request.prompt() == "<|user|>\nWhy?\n<|assistant|>\n"


def test_equal_messages_are_one_segment(tmp_path: Path) -> None:
    first, second = loaded(tmp_path, CHAT, CHAT).requests
    assert all(a is b for a, b in zip(first.segments, second.segments, strict=True))


@pytest.mark.parametrize(
    "line",
    [
        CHAT,
        {"custom_id": "r", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
        {"created": 1_700_000_000, "request": CHAT, "response": {"usage": {"completion_tokens": 9}}},
        {"request": CHAT, "response": {"status_code": 200, "body": {"usage": {"completion_tokens": 9}}}},
        {"request": CHAT, "response": "Because."},
        {**CHAT, "max_tokens": None, "usage": {"prompt_tokens": 3, "completion_tokens": 9}},
        {**CHAT, "max_tokens": 100, "response": {"usage": {"completion_tokens": 9}}},
        {**CHAT, "max_completion_tokens": 9, "max_tokens": 100},
    ],
)
def test_a_body_is_found_in_what_logs_put_around_it(tmp_path: Path, line: dict[str, object]) -> None:
    (request,) = loaded(tmp_path, line).requests
    assert request.prompt() == "<|user|>\nWhy?\n<|assistant|>\n"
    assert request.output_tokens == 9


def test_vllms_custom_data_set_is_read(tmp_path: Path) -> None:
    (request,) = loaded(tmp_path, {"prompt": "What is it?", "output_tokens": 30}).requests
    assert (request.prompt(), request.output_tokens) == ("What is it?", 30)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])],
)
def test_a_body_with_several_prompts_is_several_requests(tmp_path: Path, prompt: object, prompts: list[object]) -> None:
    usage = {"completion_tokens": 12}
    workload = loaded(tmp_path, {"id": "r", "prompt": prompt, "usage": usage})
    assert [request.prompt() for request in workload.requests] == prompts
    assert [request.output_tokens for request in workload.requests] == [12 // len(prompts)] * len(prompts)
    assert [r.request_id for r in workload.requests] == (["r"] if len(prompts) == 1 else ["r.0", "r.1"])


def test_a_body_that_asks_for_several_answers_is_as_many_requests(tmp_path: Path) -> None:
    workload = loaded(
        tmp_path,
        {"id": "r", "body": {"prompt": ["a", "b"], "n": 2}, "usage": {"completion_tokens": 12}},
        {"id": "s", "prompt": "c", "n": 1, "max_tokens": 7},
    )
    assert [request.prompt() for request in workload.requests] == ["a", "a", "b", "b", "c"]
    assert [request.output_tokens for request in workload.requests] == [3, 3, 3, 3, 7]
    assert [request.request_id for request in workload.requests] == ["r.0", "r.1", "r.2", "r.3", "s"]


def test_a_limit_beyond_measure_does_no_harm_where_the_answers_length_is_reported(tmp_path: Path) -> None:
    workload = loaded(tmp_path, {"prompt": "a", "max_tokens": 2**31 - 1, "usage": {"completion_tokens": 5}})
    assert [request.output_tokens for request in workload.requests] == [5]


def test_answers_of_unknown_length_are_reported(tmp_path: Path) -> None:
    workload = loaded(tmp_path, {"prompt": "a"}, {"prompt": "b", "max_tokens": 3}, default_output_tokens=50)
    assert [request.output_tokens for request in workload.requests] == [50, 3]
    assert "1 answers of unknown length taken as 50 tokens" in workload.note


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"timestamp": 1_700_000_000.25}, {"timestamp": 1_700_000_001}),
        ({"timestamp": 1_700_000_000_250}, {"timestamp": 1_700_000_001_000}),
        ({"timestamp": 1_700_000_000_250_000}, {"timestamp": 1_700_000_001_000_000}),
        ({"timestamp": 1_700_000_000_250_000_000}, {"timestamp": 1_700_000_001_000_000_000}),
        ({"created_at": "2023-11-14T22:13:20.25Z"}, {"created_at": "2023-11-14T22:13:21+00:00"}),
        ({"response": {"created": 0.25}}, {"response": {"created": 1}}),
        ({"response": {"body": {"created": 0.25}}}, {"response": {"body": {"created": 1}}}),
    ],
)
def test_times_of_a_log_count_from_the_first_in_any_order(
    tmp_path: Path, first: dict[str, object], second: dict[str, object]
) -> None:
    workload = loaded(tmp_path, {"id": "b", "request": CHAT} | second, {"id": "a", "request": CHAT} | first)
    assert [r.request_id for r in workload.requests] == ["a", "b"]
    assert arrivals(workload) == pytest.approx([0.0, 0.75], abs=1e-6)  # today's time has no finer steps as a float


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"body": {}}, "a request has a prompt or messages, and only one of them"),
        ({"prompt": "a", "messages": [WHY]}, "only one of them"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [[5], []]}, "the prompt is empty"),
        ({"prompt": [1, "a"]}, "mixes text and token ids"),
        ({"prompt": [-1]}, "prompt"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"content": "a"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of type 'image_url'"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 10**12}, "at most 10000000 tokens"),
        ({"prompt": "a", "n": 0}, "$.n"),
        ({"prompt": "a", "timestamp": 3}, "a time stamp although the lines before have none"),
        ("{not json", "malformed"),
    ],
)
def test_a_bad_line_of_a_log_is_named(tmp_path: Path, line: object, says: str) -> None:
    message = refusal(tmp_path, CHAT, line)
    assert message.startswith(":2: ")
    assert says in message
    assert "a line looks like {" in message


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"request": CHAT}, "no time stamp although others have"),
        ({"request": CHAT, "timestamp": "noon"}, "Invalid isoformat"),
        ({"request": CHAT, "timestamp": -5}, "-5.0 is not a time"),
    ],
)
def test_a_bad_time_of_a_log_is_named(tmp_path: Path, line: object, says: str) -> None:
    assert f":2: {says}" in refusal(tmp_path, {"timestamp": 3, "request": CHAT}, line).replace("it has ", "")


def test_an_id_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    assert ":2: request 'a' is there twice" in refusal(tmp_path, CHAT | {"id": "a"}, CHAT | {"id": "a"})


# ---- sharegpt ------------------------------------------------------------------------------------------------------


def test_each_answer_of_a_conversation_is_a_request_after_the_one_before(tmp_path: Path) -> None:
    first, second = loaded(tmp_path, {"id": "x", "conversations": TALK}).requests
    assert first.prompt() == "<|system|>\nBe brief.\n<|user|>\nWhy?\n<|assistant|>\n"
    assert second.prompt() == f"{first.prompt()}Because it is.\n<|user|>\nReally?\n<|assistant|>\n"
    assert (first.parent, second.parent) == (None, first.request_id)
    assert first.session == second.session


def test_the_parents_answer_follows_its_prompt_in_the_child(tmp_path: Path) -> None:
    workload = loaded(tmp_path, {"conversations": TALK})
    assert assert_children_continue(workload) == 1
    first, second = workload.requests
    answer = WorkloadRequest("answer", second.segments[len(first.segments) :][:1], 1)
    assert tokens(second)[len(tokens(first)) :][: first.output_tokens] == tokens(answer)[: first.output_tokens]
    assert first.output_tokens == 4  # three words and a full stop


def test_an_array_of_conversations_is_read_as_lines_of_them_are(tmp_path: Path) -> None:
    conversations = [{"conversations": TALK}, {"conversations": TALK[1:]}]
    lines = loaded(tmp_path, *conversations)
    array = read_trace(file_of(tmp_path, [json.dumps(conversations, indent=2)]))
    assert array.requests == lines.requests
    assert len(array.requests) == 4


@pytest.mark.parametrize(("user", "assistant"), [({"role": "user"}, {"role": "assistant"}), ({}, {})])
def test_sglangs_custom_data_set_is_read(tmp_path: Path, user: dict[str, str], assistant: dict[str, str]) -> None:
    turns = [user | {"content": "Why?"}, assistant | {"content": "Because."}]
    (request,) = loaded(tmp_path, {"conversations": turns}).requests
    assert request.prompt() == "<|user|>\nWhy?\n<|assistant|>\n"


def test_conversations_without_an_answer_are_left_out_and_told_of(tmp_path: Path) -> None:
    workload = loaded(tmp_path, {"conversations": []}, {"conversations": TALK[2:3]}, {"conversations": TALK})
    assert len(workload.requests) == 2
    assert "2 conversations without an answer left out" in workload.note


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([{"conversations": TALK}, {"x": 1}], ":2: there is no conversation"),
        ([{"conversations": TALK}, {"conversations": [*TALK, {"value": "a"}]}], ":2: a turn says who speaks"),
        ([{"conversations": TALK}, {"conversations": 3}], ":2: Expected `array"),
        ([json.dumps([{"conversations": TALK}, {"conversations": [{"from": "gpt"}]}])], ": item 1: a turn says"),
        (["[", "{]"], ": JSON is malformed"),
        ([{"conversations": TALK[:2]}], ": there is no request in it"),
    ],
)
def test_a_bad_conversation_is_named(tmp_path: Path, lines: list[object], says: str) -> None:
    assert refusal(tmp_path, *lines).startswith(says)
