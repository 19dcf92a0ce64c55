"""The table of endpoints: how bodies are read, translated and refused, and how answers and streams are metered."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import fields

from preble.core.types import unpack_tokens
from preble.errors import EngineProtocolError, RequestError
from preble.prompts.endpoints import (
    CHAT,
    COMPLETIONS,
    ENDPOINTS,
    Endpoint,
    ErrorForm,
    Fields,
    StreamMeter,
    UploadHead,
    by_load,
    endpoint_of,
)
from preble.prompts.endpoints.bodies import PromptLimits, decode_text
from preble.prompts.endpoints.errors import ErrorStyle
from preble.prompts.endpoints.shared_fields import Reserved

LIMITS = PromptLimits(8, 1000)
RESPONSES, MESSAGES, GENERATE = (ENDPOINTS[path] for path in ("/v1/responses", "/v1/messages", "/generate"))
TOKENS_IN, COUNT, INVOCATIONS = (
    ENDPOINTS[path] for path in ("/inference/v1/generate", "/v1/messages/count_tokens", "/invocations")
)
HI = {"role": "user", "content": "Hi"}


def read(endpoint: Endpoint, **body: Any) -> Fields:
    return endpoint.read(json.dumps({"model": "m", **body}).encode(), LIMITS)


def chat(endpoint: Endpoint, **body: Any) -> dict[str, Any]:
    """The chat that a body is translated to."""
    fields = read(endpoint, **body)
    assert fields.is_translated and not fields.by_load
    decoded: dict[str, Any] = json.loads(fields.chat)
    assert CHAT.read(fields.chat, LIMITS).model == "m"
    return decoded


def texts(fields: Fields) -> list[str]:
    """The prompts that are texts."""
    return [decode_text(prompt) for prompt in fields.prompts if isinstance(prompt, Raw)]


def messages(endpoint: Endpoint, **body: Any) -> list[dict[str, Any]]:
    return list(chat(endpoint, **body)["messages"])


def call(name: str, arguments: str, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# bodies


def test_a_system_prompt_in_blocks_is_one_message_without_the_billing_header() -> None:
    system = [{"type": "text", "text": t} for t in ("x-anthropic-billing-header: 7f", "Be ", "brief.")]
    given = messages(MESSAGES, system=system, messages=[HI], max_tokens=5)
    assert given == [{"role": "system", "content": "Be brief."}, HI]


def test_tool_use_and_its_result_become_a_call_and_a_tool_message() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a cat"}]}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    given = messages(
        MESSAGES,
        max_tokens=5,
        messages=[
            HI,
            {"role": "assistant", "content": [thinking, {"type": "text", "text": "I look."}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        ],
    )
    assert given == [
        HI,
        {"role": "assistant", "reasoning": "hm", "tool_calls": [call("look", '{"at":1}')], "content": "I look."},
        {"role": "tool", "tool_call_id": "c1", "content": "a cat"},
        {"role": "user", "content": "And?"},
    ]


def test_anthropics_images_become_urls() -> None:
    sources: list[dict[str, str]] = [
        {"type": "base64", "media_type": "image/png", "data": "QQ=="},
        {"type": "url", "url": "http://a/b.png"},
    ]
    content = [{"type": "image", "source": source} for source in sources]
    [given] = messages(MESSAGES, messages=[{"role": "user", "content": content}], max_tokens=5)
    assert [part["image_url"]["url"] for part in given["content"]] == ["data:image/png;base64,QQ==", "http://a/b.png"]


def test_anthropics_tools_become_functions_whose_schema_has_a_type() -> None:
    tool = {"name": "look", "description": "Look.", "input_schema": {"properties": {}}}
    [given] = chat(MESSAGES, messages=[HI], max_tokens=5, tools=[tool])["tools"]
    parameters = {"properties": {}, "type": "object"}
    assert given == {
        "type": "function",
        "function": {"name": "look", "description": "Look.", "parameters": parameters},
    }


def test_messages_name_their_model_stream_and_limit() -> None:
    fields = read(MESSAGES, messages=[HI], max_tokens=5, stream=True, service_tier="batch")
    assert (fields.model, fields.stream, fields.max_output_tokens, fields.service_tier) == ("m", True, 5, "batch")
    with pytest.raises(RequestError, match="`model` is missing"):
        read(MESSAGES, messages=[HI], model="")


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT, RESPONSES])
@pytest.mark.parametrize(
    ("given", "tier"),
    [
        ({"nvext": {"agent_hints": {"priority": -1, "osl": 100}}}, "flex"),
        ({"nvext": {"agent_hints": {"priority": 9}}}, None),
        ({"nvext": {"agent_hints": {"priority": 0}}}, None),
        ({"nvext": {"agent_hints": {"osl": 100}}}, None),
        ({"nvext": {"agent_hints": {"priority": "low"}}}, None),
        ({"nvext": {"agent_hints": None}}, None),
        ({"nvext": 7}, None),
        ({"nvext": None}, None),
        ({"nvext": {"agent_hints": {"priority": -1}}, "service_tier": "auto"}, "auto"),
        ({}, None),
    ],
)
def test_hints_of_agents_can_make_way_and_not_get_ahead(
    endpoint: Endpoint, given: dict[str, Any], tier: str | None
) -> None:
    body = {"prompt": "a", "messages": [HI], "input": "a"}
    assert read(endpoint, **body, **given).service_tier == tier


def test_a_responses_text_and_instructions_become_messages() -> None:
    given = messages(RESPONSES, input="Hi", instructions="Be brief.")
    assert given == [{"role": "system", "content": "Be brief."}, HI]


def test_a_responses_items_become_messages_of_one_turn() -> None:
    given = messages(
        RESPONSES,
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "a cat"},
        ],
    )
    assert given[1:] == [
        {
            "role": "assistant",
            "reasoning": "hm",
            "content": "I look.",
            "tool_calls": [call("look", "{}"), call("look", "{}", "c2")],
        },
        {"role": "tool", "content": "a cat", "tool_call_id": "c1"},
    ]


def test_an_unfinished_item_is_continued() -> None:
    item = {"type": "message", "role": "assistant", "status": "incomplete", "content": [{"text": "One, "}]}
    given = chat(RESPONSES, input=[HI, item])
    assert given["continue_final_message"] and not given["add_generation_prompt"]


def test_a_response_names_what_it_continues() -> None:
    fields = read(RESPONSES, input="And?", previous_response_id="resp_1", max_output_tokens=7)
    assert (fields.continues, fields.max_output_tokens) == ("resp_1", 7)


def test_generate_takes_a_text_ids_or_a_batch_which_is_placed_by_its_first() -> None:
    assert texts(read(GENERATE, text="Hi", sampling_params={"max_new_tokens": 3, "n": 2})) == ["Hi"]
    assert texts(read(GENERATE, text=["Hi", "Ho"])) == ["Hi"]
    [ids] = read(GENERATE, input_ids=[[1, 2], [3]]).prompts
    assert list(unpack_tokens(ids)) == [1, 2]
    assert read(GENERATE, text="Hi", lora_path="a").model == "a"
    with pytest.raises(RequestError, match="`text` and `input_ids` are missing"):
        read(GENERATE, text=None)


def test_tokens_in_takes_one_list_of_ids() -> None:
    fields = read(TOKENS_IN, token_ids=[5, 6], sampling_params={"max_tokens": 4})
    assert [list(unpack_tokens(prompt)) for prompt in fields.prompts] == [[5, 6]] and fields.max_output_tokens == 4
    for wrong in ("text", [[1], [2]], ["text"], []):
        with pytest.raises(RequestError, match="token_ids"):
            read(TOKENS_IN, token_ids=wrong)


def test_an_invocation_is_read_as_what_it_is() -> None:
    assert read(INVOCATIONS, messages=[HI]).chat and texts(read(INVOCATIONS, prompt="Hi")) == ["Hi"]
    assert read(INVOCATIONS, input="Hi").by_load


def test_an_empty_model_is_none() -> None:
    assert read(COMPLETIONS, prompt="a", model="").model is None and read(CHAT, messages=[HI], model="").model is None


GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [HI]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [HI], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [HI]},
    "/generate": {"text": "Hi"},
    "/inference/v1/generate": {"token_ids": [1]},
}


@pytest.mark.parametrize("path", [*ENDPOINTS, "/v1/unheard/of"])
def test_what_only_a_router_may_set_is_refused_everywhere(path: str) -> None:
    endpoint = endpoint_of(path)
    assert endpoint is not None
    body = GOOD.get(path, {"input": "Hi"})
    assert read(endpoint, **body).model == "m"
    names = {field.name for field in fields(Reserved) if field.type is Raw}
    assert names >= {"priority", "kv_hints", "kv_transfer_params"}
    for name in names:
        for value in ("x", -5, {"actions": []}):
            with pytest.raises(RequestError, match=f"`{name}` is set by routers only"):
                read(endpoint, **body, **{name: value})
            with pytest.raises(RequestError, match=rf"vllm_xargs\.{name}"):
                read(endpoint, **body, vllm_xargs={name: value})
    for wrong in (b"", b"{", b"[]", b'{"model": 3}', b"\xff"):
        with pytest.raises(RequestError):
            endpoint.read(wrong, LIMITS)


def test_sampling_parameters_smuggle_nothing_in() -> None:
    with pytest.raises(RequestError, match="extra_args"):
        read(TOKENS_IN, token_ids=[1], sampling_params={"extra_args": {"kv_transfer_params": {}}})
    with pytest.raises(RequestError, match=r"sampling_params\.skip_reading_prefix_cache"):
        read(TOKENS_IN, token_ids=[1], sampling_params={"skip_reading_prefix_cache": True})


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/sleep",
        "/reset_prefix_cache",
        "/v1/load_lora_adapter",
        "/v1/v1/completions",
        "/inference/v1/abort_requests",
    ],
)
def test_what_is_an_operators_business_does_not_pass(path: str) -> None:
    assert endpoint_of(path) is None


# answers and streams


def event(name: str, **data: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode()


MESSAGE = [
    event("message_start", message={"usage": {"input_tokens": 9, "output_tokens": 0}}),
    event("ping"),
    event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    event("content_block_delta", index=0, delta={"text": 'event: message_stop\n "usage": {"output_tokens": 1}'}),
    event("content_block_stop", index=0),
    event(
        "message_delta",
        delta={},
        usage={"input_tokens": 1, "output_tokens": 7, "cache_read_input_tokens": 8},
    ),
    event("message_stop"),
]
RESPONSE = [
    event("response.created", response={"id": "resp_1", "usage": None}),
    event("response.in_progress", response={"id": "resp_1", "usage": None}),
    event("response.output_item.added", item={}),
    event("response.output_text.delta", delta='"type":"response.completed"'),
    event(
        "response.completed",
        response={
            "output": "x" * 5000,
            "usage": {"input_tokens": 9, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 8}},
        },
    ),
]
RESPONSE_USAGE = {"input_tokens": 9, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 8}}
META = {"prompt_tokens": 9, "completion_tokens": 7, "cached_tokens": 8, "finish_reason": {"type": "stop"}}
GENERATED = [
    b"data: " + json.dumps({"text": "a", "meta_info": META | {"completion_tokens": 6}}).encode() + b"\n\n",
    b"data: " + json.dumps({"text": "ab", "meta_info": META}).encode() + b"\n\n",
    b"data: [DONE]\n\n",
]
MESSAGE_OF_SGLANG = [
    event("message_start", message={"usage": {"input_tokens": 1, "output_tokens": 0, "cache_read_input_tokens": 8}}),
    *MESSAGE[1:3],
    *[MESSAGE[3]] * 20,
    event("message_delta", delta={}, usage={"output_tokens": 7}),
    event("message_stop"),
]
"""It reports the prompt's tokens only at the beginning."""
STREAMS = [(MESSAGES, MESSAGE), (MESSAGES, MESSAGE_OF_SGLANG), (RESPONSES, RESPONSE), (GENERATE, GENERATED)]


def metered(endpoint: Endpoint, raw: bytes, size: int) -> StreamMeter:
    meter = endpoint.meter()
    for i in range(0, len(raw), size):
        meter.feed(raw[i : i + size])
    return meter


@pytest.mark.parametrize("size", [100, 317, 4096, 65536])
@pytest.mark.parametrize(("endpoint", "events"), STREAMS)
def test_a_streams_usage_is_found_however_it_arrives(endpoint: Endpoint, events: list[bytes], size: int) -> None:
    meter = metered(endpoint, b"".join(events), max(size, 100))
    assert meter.tokens() == (7, 8) and meter.flaw() is None and meter.error() is None and meter.has_begun


@pytest.mark.parametrize(("endpoint", "events"), STREAMS)
def test_a_stream_without_its_last_event_broke_off(endpoint: Endpoint, events: list[bytes]) -> None:
    meter = metered(endpoint, b"".join(events[:-1]), 65536)
    flaw = meter.flaw()
    assert flaw is not None and "ended without" in str(flaw)


def test_a_message_that_broke_off_has_the_tokens_that_came_and_not_the_none_of_its_start() -> None:
    meter = metered(MESSAGES, b"".join(MESSAGE_OF_SGLANG[:-2]), 65536)
    assert meter.tokens() == (len(MESSAGE_OF_SGLANG) - 2, 8)


def test_cached_tokens_are_known_however_long_the_first_block_is_in_coming() -> None:
    meter = MESSAGES.meter()
    for one in (MESSAGE_OF_SGLANG[0], *[MESSAGE[1]] * 6, *MESSAGE_OF_SGLANG[1:]):
        meter.feed(one)
    assert meter.tokens() == (7, 8)


@pytest.mark.parametrize(("endpoint", "events", "before"), [(MESSAGES, MESSAGE, 2), (RESPONSES, RESPONSE, 2)])
def test_the_prefill_is_over_with_the_first_event_of_the_answer_itself(
    endpoint: Endpoint, events: list[bytes], before: int
) -> None:
    meter = endpoint.meter()
    for one in events[:before]:
        meter.feed(one)
        assert not meter.has_begun
    meter.feed(events[before])
    assert meter.has_begun


@pytest.mark.parametrize("endpoint", [COMPLETIONS, MESSAGES, RESPONSES, GENERATE])
def test_an_error_in_a_stream_is_seen_in_the_form_in_which_it_is_sent(endpoint: Endpoint) -> None:
    meter = endpoint.meter()
    meter.feed(ErrorForm(502, "engine_error", "engine_gone", "it broke").event(endpoint.errors))
    error = meter.error()
    assert error is not None and "it broke" in str(error)


@pytest.mark.parametrize(
    ("endpoint", "answer"),
    [
        (MESSAGES, {"content": [], "usage": {"input_tokens": 1, "output_tokens": 7, "cache_read_input_tokens": 8}}),
        (
            RESPONSES,
            {"output": [], "usage": RESPONSE and {"output_tokens": 7, "input_tokens_details": {"cached_tokens": 8}}},
        ),
        (GENERATE, {"text": "a", "meta_info": META}),
        (
            GENERATE,
            [
                {"meta_info": META | {"completion_tokens": 3}},
                {"meta_info": META | {"completion_tokens": 4, "cached_tokens": 4}},
            ],
        ),
        (TOKENS_IN, {"choices": [], "usage": {"completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 8}}}),
    ],
)
def test_a_whole_answers_usage_is_found(endpoint: Endpoint, answer: Any) -> None:
    usage = endpoint.usage(json.dumps(answer).encode())
    assert usage is not None and (usage.output_tokens, usage.cached_tokens) == (7, 8)


@pytest.mark.parametrize("path", GOOD)
def test_an_answer_of_another_kind_is_no_answer(path: str) -> None:
    with pytest.raises(EngineProtocolError):
        ENDPOINTS[path].usage(b'{"detail": "well"}')


def test_errors_are_in_the_endpoints_form() -> None:
    form = ErrorForm(429, "rate_limit_error", "overloaded", "later")
    assert json.loads(form.body(ErrorStyle.ANTHROPIC)) == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "later"},
    }
    assert json.loads(form.body(ErrorStyle.RESPONSES)) == json.loads(form.body(ErrorStyle.OPENAI))
    [_, data, *_] = form.event(ErrorStyle.ANTHROPIC).splitlines()
    assert json.loads(data.removeprefix(b"data: "))["error"]["message"] == "later"


# uploads


FORM = b"multipart/form-data; boundary=edge"
FILE_FIRST = (
    b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\r\n\r\nsound\r\n'
    b"--edge\r\ncontent-disposition: form-data; name=model\r\ncontent-type: text/plain\r\n\r\nwhisper\r\n--edge--"
)


@pytest.mark.parametrize("size", [1, 2, 7, 50, 1000])
def test_a_form_names_its_model_however_its_pieces_are_cut(size: int) -> None:
    head = UploadHead(FORM, 400)
    pieces = (FILE_FIRST[i : i + size] for i in range(0, len(FILE_FIRST), size))
    fields = next(fields for fields in map(head.add, pieces) if fields is not None)
    assert (fields.model, fields.load_tokens) == ("whisper", 100)
    assert FILE_FIRST.startswith(bytes(head.bytes)) and b"whisper\r\n--edge" in head.bytes


def test_a_part_only_counts_as_the_model_by_its_own_headers() -> None:
    head = UploadHead(FORM, 0)
    form = (
        b'--edge\r\nContent-Disposition: form-data; name="file"\r\n\r\ncontent-disposition: form-data; name="model"\r\n'
    )
    assert head.add(form + b"\r\nno\r\n--edge--") is None
    assert head.whole().model is None


class Searched(bytearray):
    """Counts the bytes that are searched."""

    count = 0

    def find(self, what: Any, start: Any = 0, end: Any = None) -> int:
        Searched.count += len(self) - start
        return super().find(what, start)


def test_each_byte_before_the_model_is_searched_once() -> None:
    head = UploadHead(FORM, 0)
    head.bytes = Searched()
    for _ in range(1000):
        head.add(bytes(1000))
    assert Searched.count < 1_100_000


def test_a_form_that_names_no_model_for_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_load, "MOST_BEFORE_MODEL", 1 << 20)  # ships 32 MiB
    head = UploadHead(FORM, 0)
    head.add(bytes(1 << 20))
    with pytest.raises(RequestError, match="first 1 MiB name no model; send the field `model` before the file"):
        head.add(b"x")


def test_a_session_is_read_from_completions_chats_and_responses() -> None:
    bodies = ((COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": [HI]}), (RESPONSES, {"input": "Hi"}))
    for endpoint, body in bodies:
        assert read(endpoint, **body, prompt_cache_key="k").session == "k"
        assert read(endpoint, **body, conversation={"id": "c"}, prompt_cache_key="k").session == "c"
        assert read(endpoint, **body).session is None
