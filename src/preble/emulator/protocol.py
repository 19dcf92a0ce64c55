"""OpenAI's bodies and answers in vLLM's form: the part that an emulated model supports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from preble.core.types import PackedTokens, pack_tokens
from preble.errors import RequestError
from preble.prompts.endpoints import bodies

Count = Annotated[int, msgspec.Meta(ge=1)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=128)]
Messages = Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for `/v1/completions`."""
DEFAULT_GENERATE_TOKENS = 128
"""SGLang's default for `/generate`."""


class _Checked(msgspec.Struct):
    """A body that is checked after it is decoded."""

    def check(self) -> None:
        """Raises: RequestError: it asks for what is not emulated, or contradicts itself."""


class _GenerationBody(_Checked, kw_only=True):
    """Fields of both endpoints. What is not named here (temperature, stop, ...) is accepted and has no effect."""

    model: str | None = None
    n: Choices | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: bodies.StreamOptions | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options can only be given with stream=true", param="stream_options")


class EmulatedCompletion(_GenerationBody, kw_only=True):
    prompt: Any
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
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt, list) and self.prompt:
            if all(isinstance(item, str) for item in self.prompt):
                return list(self.prompt)
            if all(type(item) is int for item in self.prompt):
                return [packed(self.prompt)]
            if all(isinstance(item, list) for item in self.prompt):
                return [packed(item) for item in self.prompt]
        raise RequestError("prompt must be a text, a list of token ids, or a list of either", param="prompt")


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


class EmulatedGenerate(_Checked, kw_only=True):
    """Of SGLang's `/generate` and vLLM's `/inference/v1/generate`: `text`, `input_ids` or `token_ids`."""

    model: str | None = None
    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    token_ids: list[Any] | None = None
    sampling_params: EmulatedSampling | None = None
    stream: bool | None = None
    stream_options: bodies.StreamOptions | None = None
    cache_salt: str | None = None

    def check(self) -> None:
        """Raises: RequestError: it has no prompt, or several."""
        if sum(given is not None for given in (self.text, self.input_ids, self.token_ids)) != 1:
            raise RequestError("give one of text, input_ids and token_ids", param="text")

    def as_completion(self) -> EmulatedCompletion:
        """Return the same request as a completion."""
        sampling = self.sampling_params or EmulatedSampling()
        prompt = next(given for given in (self.text, self.input_ids, self.token_ids) if given is not None)
        return EmulatedCompletion(
            prompt=prompt,
            model=self.model,
            n=sampling.n,
            max_tokens=sampling.max_new_tokens or sampling.max_tokens or DEFAULT_GENERATE_TOKENS,
            stream=self.stream,
            stream_options=self.stream_options,
            cache_salt=self.cache_salt,
        )


class EmbeddingBody(_Checked, kw_only=True):
    input: Any
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
        tools=msgspec.Raw(msgspec.json.encode(chat.tools)),
        documents=msgspec.Raw(msgspec.json.encode(chat.documents)),
        chat_template_kwargs=chat.chat_template_kwargs,
        reasoning_effort=chat.reasoning_effort,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
    )


BodyType = TypeVar("BodyType", bound=_Checked)


def decode_body(body: bytes, form: type[BodyType]) -> BodyType:
    """Return a checked body. Raises: RequestError: it is not JSON, of a wrong type, or not emulated."""
    try:
        decoded = msgspec.json.decode(body, type=form)
    except msgspec.ValidationError as error:
        message = str(error)
        field = message.partition("`$.")[2].partition("`")[0] or None
        raise RequestError(f"wrong request body: {message}", param=field) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the request body is not JSON: {error}") from error
    decoded.check()
    return decoded


def decode_object(body: bytes) -> dict[str, Any]:
    """Return a body's fields. Raises: RequestError: it is no object in JSON."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the request body is not a JSON object: {error}") from error


def check_messages(messages: Sequence[dict[str, Any]]) -> None:
    """Raises: RequestError: a message has no role."""
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{i}] needs a role", param="messages")


def packed(token_ids: list[Any]) -> PackedTokens:
    """Raises: RequestError: an element is no token id."""
    if not all(type(token_id) is int for token_id in token_ids):
        raise RequestError("a list of token ids may hold integers only", param="prompt")
    try:
        return pack_tokens(token_ids)
    except OverflowError as error:
        raise RequestError("token ids must be from 0 to 2**32 - 1", param="prompt") from error


def error_body(message: str, code: str, param: str | None) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}


def anthropic_error(message: str, status: int) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    kind = {404: "not_found_error"}.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object, in tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def server_sent(data: dict[str, Any]) -> bytes:
    """Return one event of a stream."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
