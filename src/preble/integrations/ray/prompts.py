"""What a call of a deployment asks for: its prompt, found among the call's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from preble.prompts.endpoints import CHAT, COMPLETIONS, Endpoint

_IDS = ("prompt_token_ids", "token_ids")
_FIELDS = (*_IDS, "prompt", "messages")


@dataclass(frozen=True, slots=True)
class EndpointRequest:
    """A request as OpenAI's API has it: `body` in JSON, for `endpoint`."""

    endpoint: Endpoint
    body: bytes


def asked_of(arguments: Iterable[Any], multiplexed_model: str = "") -> EndpointRequest | None:
    """Return what the first argument with a prompt asks for, None if none has one.

    Such an argument is a mapping, a Pydantic model or another object with `messages`, `prompt` (text or token ids) or
    `prompt_token_ids`. `multiplexed_model`: prompts for different ones share no KV cache.

    Raises: TypeError: the argument has values that JSON has not.
    """
    for argument in arguments:
        fields = _fields_of(argument)
        if any(fields.get(name) for name in _FIELDS):
            return _asked(dict(fields), multiplexed_model)
    return None


def _fields_of(argument: Any) -> Mapping[str, Any]:
    if isinstance(argument, Mapping):
        return argument
    if hasattr(argument, "model_dump") and any(hasattr(argument, name) for name in _FIELDS):
        dumped: Mapping[str, Any] = argument.model_dump(mode="json", exclude_unset=True)
        return dumped
    return getattr(argument, "__dict__", {})


def _asked(fields: dict[str, Any], multiplexed_model: str) -> EndpointRequest:
    fields.pop("model", None)  # a deployment serves one; replicas that load several are told apart by the salt
    if multiplexed_model:
        fields["cache_salt"] = f"{multiplexed_model}/{fields.get('cache_salt', '')}"
    if fields.get("messages"):
        return EndpointRequest(CHAT, msgspec.json.encode(fields))
    ids = next((fields[name] for name in _IDS if fields.get(name)), None)
    if ids is not None:
        fields["prompt"] = ids
    elif isinstance(several := fields["prompt"], list) and isinstance(several[0], (str, list)):
        fields["prompt"] = several[0]  # one replica gets them all
    return EndpointRequest(COMPLETIONS, msgspec.json.encode(fields))
