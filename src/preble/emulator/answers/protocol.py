"""OpenAI's bodies and answers in vLLM's form: the part that an emulated model supports."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import inf
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Raw

from preble.core.types import PackedTokens
from preble.emulator.kv.p2p_tier import KvTransfer
from preble.errors import RequestError
from preble.prompts.endpoints import bodies
from preble.prompts.endpoints.shared_fields import has_value

Count = Annotated[int, msgspec.Meta(ge=1)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=128)]
Messages = Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for `/v1/completions`."""
DEFAULT_GENERATE_TOKENS = 128
"""SGLang's default for `/generate`."""
_ANY_NUMBER = bodies.PromptLimits(2**32, inf)
_OBJECT = msgspec.json.Decoder(dict[str, Any])


class _Checked(msgspec.Struct):
    """A body that is checked after it is decoded."""

    def check(self) -> None:
        """Raises: RequestError: it asks for what is not emulated, or contradicts itself."""


class PairedBody(_Checked, kw_only=True):
    """Fields that name where a prefilling and a decoding replica meet, each one value or one for each prompt."""

    n: Choices | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int] | None = None
    bootstrap_room: int | list[int] | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1


PAIR_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


class _GenerationBody(PairedBody, kw_only=True):
    """Fields of both endpoints. What is not named here (temperature, stop, ...) is accepted and has no effect."""

    model: str | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: bodies.StreamOptions | None = None
    cache_salt: str | None = None
    kv_transfer_params: KvTransfer | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options can only be given with stream=true", param="stream_options")


class EmulatedCompletion(_GenerationBody, kw_only=True):
    prompt: Raw
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None

    def check(self) -> None:
        super().check()
        for name in ("echo", "suffix"):
            if getattr(self, name):
                raise RequestError(f"{name} is not emulated; leave it out", param=name)

    @property
    def limit(self) -> int | None:
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives each token gets, None for no logprobs."""
        return self.logprobs

    def prompts(self) -> list[str | PackedTokens]:
        """Return each prompt, as text or as packed ids. Raises: RequestError: the field is none of the four forms."""
        found = bodies.decode_prompts(self.prompt, _ANY_NUMBER)
        return [bodies.decode_text(prompt) if isinstance(prompt, Raw) else prompt for prompt in found]


class EmulatedChat(_GenerationBody, kw_only=True):
    messages: Messages
    max_completion_tokens: Count | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    documents: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        super().check()
        check_messages(self.messages)

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives each token gets, None for no logprobs."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class EmulatedSampling(msgspec.Struct):
    """EmulatedSampling parameters, of SGLang or of vLLM."""

    max_new_tokens: Count | None = None
    max_tokens: Count | None = None
    n: Choices | None = None


class EmulatedGenerate(PairedBody, kw_only=True):
    """Of SGLang's `/generate` and vLLM's `/inference/v1/generate`: `text`, `input_ids` or `token_ids`."""

    model: str | None = None
    text: Raw = Raw(b"")
    input_ids: Raw = Raw(b"")
    token_ids: Raw = Raw(b"")
    sampling_params: EmulatedSampling | None = None
    stream: bool | None = None
    stream_options: bodies.StreamOptions | None = None
    cache_salt: str | None = None

    def as_completion(self) -> EmulatedCompletion:
        """Return the same request as a completion. Raises: RequestError: it has no prompt, or several."""
        sampling = self.sampling_params or EmulatedSampling()
        given = [field for field in (self.text, self.input_ids, self.token_ids) if has_value(field)]
        if len(given) != 1:
            raise RequestError("give one of text, input_ids and token_ids", param="text")
        return EmulatedCompletion(
            prompt=given[0],
            model=self.model,
            n=sampling.n,
            max_tokens=sampling.max_new_tokens or sampling.max_tokens or DEFAULT_GENERATE_TOKENS,
            stream=self.stream,
            stream_options=self.stream_options,
            cache_salt=self.cache_salt,
            bootstrap_host=self.bootstrap_host,
            bootstrap_port=self.bootstrap_port,
            bootstrap_room=self.bootstrap_room,
        )


class EmbeddingBody(_Checked, kw_only=True):
    input: Raw
    model: str | None = None
    dimensions: Count | None = None
    encoding_format: str | None = None


class DetokenizeBody(_Checked, kw_only=True):
    tokens: list[int]
    model: str | None = None


class AdapterBody(_Checked):
    """Of vLLM's `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

    lora_name: Annotated[str, msgspec.Meta(min_length=1)]


class TokenizeBody(_Checked):
    """vLLM's two forms in one: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None

    def check(self) -> None:
        """Raises: RequestError: there is no text to tokenize, or two."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        check_messages(self.messages or [])


def as_rendered(chat: EmulatedChat | TokenizeBody) -> bodies.ChatBody:
    """Return a chat as the templates of its model take it, without the messages."""
    return bodies.ChatBody(
        tools=Raw(msgspec.json.encode(chat.tools)),
        documents=Raw(msgspec.json.encode(chat.documents)),
        chat_template_kwargs=chat.chat_template_kwargs,
        reasoning_effort=chat.reasoning_effort,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
    )


BodyType = TypeVar("BodyType", bound=_Checked)


@cache
def _decoder(form: type[BodyType]) -> msgspec.json.Decoder[BodyType]:
    return msgspec.json.Decoder(form)


def decode_body(body: bytes, form: type[BodyType]) -> BodyType:
    """Return a checked body. Raises: RequestError: it is not JSON, of a wrong type, or not emulated."""
    given: BodyType = bodies.decoded(_decoder(form), body)
    given.check()
    return given


def decode_object(body: bytes) -> dict[str, Any]:
    """Return a body's fields. Raises: RequestError: it is no object in JSON."""
    fields: dict[str, Any] = bodies.decoded(_OBJECT, body)
    return fields


def check_messages(messages: Sequence[dict[str, Any]]) -> None:
    """Raises: RequestError: a message has no role."""
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{i}] needs a role", param="messages")


def server_sent(data: dict[str, Any]) -> bytes:
    """Return one event of a stream."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
