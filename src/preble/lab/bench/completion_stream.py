"""A completion as it is streamed: how to ask for it, server-sent events, and what is read of each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class StreamUsage(msgspec.Struct):
    """The tokens of a completion, in its last event. `cached_tokens`: None if the engine does not report them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class StreamError(msgspec.Struct):
    code: str | int | None = None
    message: str = ""


class CompletionEvent(msgspec.Struct):
    """What is read of one event, or of the body of an error; everything else in it is skipped."""

    choices: list[msgspec.Raw] = []
    usage: StreamUsage | None = None
    error: StreamError | None = None
    message: str = ""


def completion_body(model: str | None, prompt: str | Sequence[int], output_tokens: int) -> dict[str, object]:
    """Return the body that asks for a streamed completion, and for its usage at the end."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def server_sent_data(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the `data` of each server-sent event, whatever pieces the bytes arrive in; other fields are skipped."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
