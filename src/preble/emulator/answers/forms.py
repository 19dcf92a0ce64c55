"""What one request is answered: events of a stream or one body, in the form of each endpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from preble.emulator.answers.protocol import server_sent
from preble.emulator.generation import Generation, Piece

DONE = b"data: [DONE]\n\n"
LOGPROB = -0.5
"""Of every token: made up."""


@dataclass(slots=True)
class Tally:
    """The pieces of each sequence, and of those that have ended the tokens: of prompts (each counted once), of answers,
    cached.
    """

    num_choices: int
    texts: list[list[str]]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def take(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self.texts[piece.index].append(piece.text)
            if (finished := piece.finished) is not None:
                self.completion_tokens += finished.num_output_tokens
                if piece.index % self.num_choices == 0:
                    self.prompt_tokens += finished.num_prompt_tokens
                    self.cached_tokens += finished.num_cached_tokens

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(ABC):
    """One answer's constant parts. `finish_reason`: the same for every choice, as OpenAI names it. `tool`: whose
    arguments the text is, None for prose. `logprobs`: how many alternatives each token gets, None for no logprobs.
    """

    answer_id: str
    model: str
    created: int
    fingerprint: str
    finish_reason: str
    num_choices: int
    num_sequences: int
    tool: str | None = None
    logprobs: int | None = None
    include_usage: bool = False
    streamed: list[Any] = field(default_factory=list)
    """The whole answer, once its stream has ended."""

    async def whole(self, generation: Generation) -> Any:
        """Return the body of an answer that is not streamed."""
        said = self._begun()
        async for pieces in generation.pieces():
            said.take(pieces)
        return self.body(said)

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream, one or more for each token, and its end."""
        said = self._begun()
        if opening := self.opening():
            yield opening
        async for pieces in generation.pieces():
            said.take(pieces)
            yield b"".join(self.piece(piece, said.texts[piece.index]) for piece in pieces)
        self.streamed.append(self.body(said))
        yield self.closing(said)

    def _begun(self) -> Tally:
        return Tally(self.num_choices, [[] for _ in range(self.num_sequences)])

    @abstractmethod
    def body(self, said: Tally) -> Any:
        """Return the whole answer."""

    def opening(self) -> bytes:
        """Return the events before the first token."""
        return b""

    @abstractmethod
    def piece(self, piece: Piece, so_far: Sequence[str]) -> bytes:
        """Return the events of one token. `so_far`: the pieces of its sequence, it included."""

    @abstractmethod
    def closing(self, said: Tally) -> bytes:
        """Return the last events."""


class _OpenAIAnswer(Answer):
    """`CHUNK`: the kind of each event."""

    __slots__ = ()
    CHUNK: ClassVar[str]

    def envelope(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return what a whole answer and each event have in common."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }

    def closing(self, said: Tally) -> bytes:
        end = server_sent(self.envelope(self.CHUNK, []) | {"usage": said.usage()}) if self.include_usage else b""
        return end + DONE


class Completion(_OpenAIAnswer):
    """Of `/v1/completions`."""

    __slots__ = ()
    CHUNK = "text_completion"

    def body(self, said: Tally) -> Any:
        choices = [self._choice(index, pieces, self.finish_reason) for index, pieces in enumerate(said.texts)]
        return self.envelope(self.CHUNK, choices) | {"usage": said.usage()}

    def _choice(self, index: int, pieces: Sequence[str], reason: str | None, offset: int = 0) -> dict[str, Any]:
        logprobs = None if self.logprobs is None else _text_logprobs(pieces, offset, self.logprobs)
        return {"index": index, "text": "".join(pieces), "logprobs": logprobs, "finish_reason": reason}

    def piece(self, piece: Piece, so_far: Sequence[str]) -> bytes:
        reason = self.finish_reason if piece.finished else None
        offset = sum(map(len, so_far)) - len(piece.text) if self.logprobs is not None else 0
        return server_sent(self.envelope(self.CHUNK, [self._choice(piece.index, [piece.text], reason, offset)]))


class Chat(_OpenAIAnswer):
    """Of `/v1/chat/completions`."""

    __slots__ = ()
    CHUNK = "chat.completion.chunk"

    def body(self, said: Tally) -> Any:
        choices = [self._choice(index, "message", self._message(p), p) for index, p in enumerate(said.texts)]
        return self.envelope("chat.completion", choices) | {"usage": said.usage()}

    def _message(self, pieces: Sequence[str]) -> dict[str, Any]:
        text = "".join(pieces)
        if self.tool is None:
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": None, "tool_calls": [self._call(text)]}

    def _call(self, arguments: str) -> dict[str, Any]:
        return {"id": call_id(self), "type": "function", "function": {"name": self.tool, "arguments": arguments}}

    def _choice(
        self, index: int, name: str, value: dict[str, Any], pieces: Sequence[str], reason: str | None = ""
    ) -> dict[str, Any]:
        logprobs = None if self.logprobs is None else {"content": _chat_logprobs(pieces, self.logprobs)}
        reason = self.finish_reason if reason == "" else reason
        return {"index": index, name: value, "logprobs": logprobs, "finish_reason": reason}

    def piece(self, piece: Piece, so_far: Sequence[str]) -> bytes:
        chunks = []
        if len(so_far) == 1:
            first: dict[str, Any] = {"role": "assistant", "content": ""}
            if self.tool is not None:
                first = {"role": "assistant", "content": None, "tool_calls": [{"index": 0, **self._call("")}]}
            chunks.append(self._choice(piece.index, "delta", first, [], None))
        delta: dict[str, Any] = {"content": piece.text}
        if self.tool is not None:
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": piece.text}}]}
        reason = self.finish_reason if piece.finished else None
        chunks.append(self._choice(piece.index, "delta", delta, [piece.text], reason))
        return b"".join(server_sent(self.envelope(self.CHUNK, [chunk])) for chunk in chunks)


def call_id(answer: Answer) -> str:
    """Return the id of the answer's one tool call."""
    return f"call_{answer.answer_id.partition('-')[2] or answer.answer_id}"


def _chat_logprobs(pieces: Sequence[str], num_top: int) -> list[dict[str, Any]]:
    shown = [{"token": text, "logprob": LOGPROB, "bytes": list(text.encode())} for text in pieces]
    return [token | {"top_logprobs": [token] * min(num_top, 1)} for token in shown]


def _text_logprobs(pieces: Sequence[str], offset: int, num_top: int) -> dict[str, Any]:
    offsets = []
    for text in pieces:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": list(pieces),
        "token_logprobs": [LOGPROB] * len(pieces),
        "top_logprobs": [{text: LOGPROB} if num_top else None for text in pieces],
        "text_offset": offsets,
    }
