from __future__ import annotations

from typing import Any

import msgspec
import pytest

from preble.core.types import pack_tokens
from preble.prompts.endpoints.ids import with_ids

IDS = pack_tokens([1, 70_000, 3])


async def sent(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(await with_ids(path, msgspec.json.encode(fields), IDS))
    return decoded


async def test_ids_take_the_place_of_the_text_and_all_else_stays() -> None:
    others = {"max_tokens": 4, "logit_bias": {"prompt": 1}, "echo": False, "suffix": None}
    assert await sent("/v1/completions", {"prompt": "é \\ text", **others}) == {"prompt": [1, 70_000, 3], **others}
    others = {"sampling_params": {"text": "inside"}, "image_data": None}
    assert await sent("/generate", {"text": "a text", **others}) == {"input_ids": [1, 70_000, 3], **others}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a", "echo": True}),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/v1/completions", {"prompt": "a", "add_special_tokens": False}),
        ("/v1/completions", {"prompt": "a", "of_tomorrow": False}),
        ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 2}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/completions", {"prompt": [1, 2]}),
        ("/v1/chat/completions", {"messages": []}),
        ("/generate", {"text": ["a", "b"]}),
        ("/generate", {"text": "a", "image_data": "http://x"}),
        ("/generate", {"text": "a", "lora_path": "b"}),
    ],
)
async def test_a_body_stays_where_only_the_text_gives_the_same_answer(path: str, fields: dict[str, Any]) -> None:
    assert await sent(path, fields) == fields


async def test_many_ids_are_encoded_in_turns_and_whole() -> None:
    many = list(range(100_000))
    body = await with_ids("/v1/completions", b'{"prompt":"text"}', pack_tokens(many))
    assert msgspec.json.decode(body) == {"prompt": many}
