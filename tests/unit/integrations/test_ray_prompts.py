"""What Preble's router finds in the arguments of a call of a Ray Serve deployment, and in a replica's routing stats."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from preble.integrations.ray.prompts import asked_of
from preble.integrations.ray.replica import ADAPTER, Advert, advert_of, member_of
from preble.prompts.endpoints import CHAT, COMPLETIONS

MESSAGES = [{"role": "user", "content": "hello"}]


class Model:
    """Stands for a Pydantic model."""

    prompt = "hello"

    def model_dump(self, **options: Any) -> dict[str, Any]:
        assert options == {"mode": "json", "exclude_unset": True}
        return {"prompt": self.prompt, "max_tokens": 3}


@pytest.mark.parametrize(
    ("argument", "prompt"),
    [
        ({"prompt": "hello", "max_tokens": 3}, "hello"),
        ({"prompt_token_ids": [1, 2], "max_tokens": 3}, [1, 2]),
        ({"prompt": [1, 2], "max_tokens": 3}, [1, 2]),
        ({"prompt": ["hello", "again"], "max_tokens": 3}, "hello"),
        ({"prompt": [[1, 2], [3]], "max_tokens": 3}, [1, 2]),
        (SimpleNamespace(prompt="hello", max_tokens=3), "hello"),
        (Model(), "hello"),
    ],
)
def test_a_completion_is_found_in_any_form_of_argument(argument: Any, prompt: Any) -> None:
    asked = asked_of([7, "text", None, argument])
    assert asked is not None and asked.endpoint is COMPLETIONS
    body = msgspec.json.decode(asked.body)
    assert (body["prompt"], body["max_tokens"]) == (prompt, 3)


def test_a_chat_is_found_and_the_name_of_its_model_is_left_out() -> None:
    asked = asked_of([{"model": "m", "messages": MESSAGES}])
    assert asked is not None and asked.endpoint is CHAT
    assert msgspec.json.decode(asked.body) == {"messages": MESSAGES}


def test_multiplexed_models_share_no_kv() -> None:
    asked = asked_of([{"prompt": "hello", "cache_salt": "tenant"}], "adapter")
    assert asked is not None and msgspec.json.decode(asked.body)["cache_salt"] == "adapter/tenant"


@pytest.mark.parametrize("arguments", [[], [1, "text", None], [{"prompt": ""}], [{"other": 1}], [b"bytes"]])
def test_a_call_without_a_prompt_asks_for_nothing(arguments: list[Any]) -> None:
    assert asked_of(arguments) is None


def test_a_replica_joins_anew_when_its_routing_stats_come() -> None:
    silent, says = advert_of({}), advert_of({"kv_event_metadata": {"endpoint": "tcp://10.0.0.1:5557", "kv_tokens": 64}})
    before, after = member_of("http://abc", silent), member_of("http://abc", says)
    assert before.replica.engine == ADAPTER and before.replica.kv_events is None
    assert after.replica.kv_events == "tcp://10.0.0.1:5557"
    assert not before.is_same_replica(after)


@pytest.mark.parametrize("stats", [{"kv_event_metadata": {"endpoint": 7}}, {"kv_event_metadata": "no"}, {"other": 1}])
def test_malformed_routing_stats_say_nothing(stats: dict[str, Any]) -> None:
    assert advert_of(stats) == Advert()
