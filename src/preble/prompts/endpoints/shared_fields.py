"""The fields that the bodies of all endpoints share: what no body may have, and what names a session or makes way.

Which fields no body may have was read in the request models of vLLM 0.32.0 and SGLang 0.5.23, and found by sending real
engines what the gateway would pass on (`tests/support/odd_bodies.py`). docs/reference/http-api.md lists them for
clients. They are refused whichever engine is behind, for a request may move to another one. Token ids of prompts are
checked where they are decoded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from msgspec import Raw, Struct

from preble.errors import RequestError


class Reserved(Struct):
    """Fields that only a router may set: by one, a client could read other tenants' KV blocks, end an engine, or go
    before others in its queue and its KV cache.

    Taken from the request models of vLLM 0.32.0 and SGLang 0.5.23.
    """

    bootstrap_host: Raw = Raw(b"")
    bootstrap_pair_key: Raw = Raw(b"")
    bootstrap_port: Raw = Raw(b"")
    bootstrap_room: Raw = Raw(b"")
    data_parallel_rank: Raw = Raw(b"")
    decode_tp_size: Raw = Raw(b"")
    disagg_prefill_dp_rank: Raw = Raw(b"")
    ec_transfer_params: Raw = Raw(b"")
    encoder_urls: Raw = Raw(b"")
    extra_key: Raw = Raw(b"")
    http_worker_ipc: Raw = Raw(b"")
    kv_cache_report_mode: Raw = Raw(b"")
    kv_hints: Raw = Raw(b"")
    kv_transfer_params: Raw = Raw(b"")
    lora_id: Raw = Raw(b"")
    need_wait_for_mm_inputs: Raw = Raw(b"")
    num_items_assigned: Raw = Raw(b"")
    priority: Raw = Raw(b"")
    routed_dp_rank: Raw = Raw(b"")
    routing_key: Raw = Raw(b"")
    session_params: Raw = Raw(b"")
    skip_reading_prefix_cache: Raw = Raw(b"")
    vllm_xargs: dict[str, Raw] | None = None
    extra_args: dict[str, Raw] | None = None


class CheckedFields(Reserved, kw_only=True):
    """Fields of which some values end an engine, too: see `RULES` and `NEVER`."""

    custom_labels: Raw = Raw(b"")
    logprobs: Raw = Raw(b"")
    positional_embed_overrides: Raw = Raw(b"")
    stop_regex: Raw = Raw(b"")
    stop_token_ids: Raw = Raw(b"")
    top_k: Raw = Raw(b"")
    top_logprobs: Raw = Raw(b"")
    top_logprobs_num: Raw = Raw(b"")


class Limits(NamedTuple):
    """What each number in a field must be: at least `least` and below `end`; None for as many ids as the model has.

    `source`: where another one ends an engine, and how.
    """

    least: int
    end: int | None
    source: str


_INT32 = 2**31
_OVERFLOWS = "SGLang 0.5.23: it does not fit into a tensor of 32 bits, which raises in the scheduler; the server ends"
_TOO_MANY = "SGLang 0.5.23: `topk` of more than there are raises in the scheduler; the server ends"
_OUTSIDE = "SGLang 0.5.23: with `min_tokens` it is an index into the logits, which raises; the server ends"
RULES: Mapping[str, Limits] = MappingProxyType(
    {
        "logprobs": Limits(-_INT32, None, _TOO_MANY),
        "stop_token_ids": Limits(0, None, _OUTSIDE),
        "top_k": Limits(-_INT32, _INT32, _OVERFLOWS),
        "top_logprobs": Limits(-_INT32, None, _TOO_MANY),
        "top_logprobs_num": Limits(-_INT32, None, _TOO_MANY),
    }
)
NEVER: Mapping[str, str] = MappingProxyType(
    {
        "custom_labels": "SGLang 0.5.23 with metrics: a label that they do not have raises, and the server ends",
        "positional_embed_overrides": "SGLang 0.5.23: it is for programs that import the engine; `{}` ends it",
        "stop_regex": "SGLang 0.5.23: its scheduler searches each answer with it; `(.+)+@` stops all requests for ever",
    }
)
_SMALL_VOCABULARY = 32_000
"""As many ids as every model in use has, where the model's own number is not known."""
_NUMBER = re.compile(rb"-?\d[\d.eE+-]*")
_OPEN = ("vllm_xargs", "extra_args")
"""Objects of a body for fields that extensions of vLLM define, and that vLLM looks for its own in."""
_RESERVED = tuple(field.name for field in msgspec.structs.fields(Reserved) if field.type is Raw)
_reserved_of = attrgetter(*_RESERVED, *_OPEN)
_risky_of = attrgetter(*RULES, *NEVER)
_NOTHING_RESERVED, _NOTHING_RISKY = _reserved_of(Reserved()), _risky_of(CheckedFields())


def check_fields(fields: CheckedFields, vocabulary: int | None, within: str = "") -> None:
    """Refuse fields of routers, and values that end an engine.

    `vocabulary`: how many token ids the model has, None if that is not known. `within`: where in the body the fields
    are, up to the point. Raises: RequestError.
    """
    refuse_reserved(fields, within)
    if _risky_of(fields) == _NOTHING_RISKY:
        return
    for name in NEVER:
        if has_value(getattr(fields, name)):
            raise RequestError(f"`{within}{name}` is not taken: it can stop a replica", param=within + name)
    for name, rule in RULES.items():
        end = rule.end or vocabulary or (_SMALL_VOCABULARY if rule.least < 0 else 2**32)
        for number in _NUMBER.findall(getattr(fields, name)):
            if not _is_between(number, rule.least, end):
                text = f"`{within}{name}` has {number[:20].decode()}: give at least {rule.least} and less than {end}"
                raise RequestError(text, param=within + name)


def refuse_reserved(fields: Reserved, within: str = "") -> None:
    """`within`: where in the body the fields are, up to the point. Raises: RequestError."""
    if _reserved_of(fields) == _NOTHING_RESERVED:
        return
    given = [name for name in _RESERVED if has_value(getattr(fields, name))]
    for where in _OPEN:
        given += [f"{where}.{name}" for name in getattr(fields, where) or () if name in _RESERVED]
    if given:
        name = within + given[0]
        raise RequestError(f"`{name}` is set by routers only; leave it out", param=name)


def has_value(raw: Raw) -> bool:
    """Return whether a field has a value other than null. Copies nothing, however long the field is."""
    data = memoryview(raw)
    return data.nbytes != 0 and not (data.nbytes == 4 and bytes(data) == b"null")


def _is_between(number: bytes, least: int, end: int) -> bool:
    try:
        return least <= float(number) < end
    except ValueError:  # no number, which the engine refuses
        return True


# the work that a request is part of

SESSION_NAME = re.compile(rb"[\x21-\x7e]{1,256}")
"""What can be in a header, and is short."""
FLEX = "flex"
"""OpenAI's service tier of work that may take its time."""


class SessionFields(CheckedFields, kw_only=True):
    """The fields of vLLM and OpenAI that name a session, in the order in which they count, and those of urgency.

    `nvext`: Dynamo's, with the hints of agents.
    """

    session_id: Raw = Raw(b"")
    conversation: Raw = Raw(b"")
    prompt_cache_key: Raw = Raw(b"")
    service_tier: str | None = None
    nvext: Raw = Raw(b"")


class _AgentHints(Struct):
    priority: float | None = None


class _DynamoExtension(Struct):
    agent_hints: _AgentHints | None = None


class _OpenAIConversation(Struct):
    id: str


_EXTENSION = msgspec.json.Decoder(_DynamoExtension | None)
_NAMED = msgspec.json.Decoder(str | _OpenAIConversation | None)


def session_in(fields: SessionFields) -> str | None:
    """Return the name of the session; None where there is none that can be in a header."""
    for raw in (fields.session_id, fields.conversation, fields.prompt_cache_key):
        if memoryview(raw).nbytes and (name := _name(raw)) is not None:
            return name
    return None


def tier_in(fields: SessionFields) -> str | None:
    """Return the service tier that the body names: `flex` where it names none and its agent hints that others go first,
    by a priority below 0. Others of its hints change nothing here: a request can make way, and cannot get ahead.
    """
    if fields.service_tier is not None or not memoryview(fields.nvext).nbytes:
        return fields.service_tier
    try:
        given = _EXTENSION.decode(fields.nvext)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None  # it is advice, and the engine knows no such field
    hints = None if given is None else given.agent_hints
    return FLEX if hints is not None and (hints.priority or 0) < 0 else None


def _name(raw: Raw) -> str | None:
    try:
        given = _NAMED.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None  # the engine says what is wrong with it
    name = given.id if isinstance(given, _OpenAIConversation) else given or ""
    return name if SESSION_NAME.fullmatch(name.encode(errors="replace")) else None
