"""What one request is answered: chunks of a stream or one body, for text and for chat."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from preble.core.replica.sequence import Finished
from preble.engines.emulator.engine import Generation, Piece
from preble.engines.emulator.protocol import server_sent, usage


@dataclass(slots=True)
class Tally:
    """What is known when every sequence has ended: tokens of the prompts (each counted once), of answers, cached."""

    num_choices: int
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def count(self, index: int, finished: Finished) -> None:
        self.completion_tokens += finished.num_output_tokens
        if index % self.num_choices == 0:
            self.prompt_tokens += finished.num_prompt_tokens
            self.cached_tokens += finished.num_cached_tokens

    def usage(self) -> dict[str, Any]:
        return usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer's constant parts. `is_chat` decides its form; `finish_reason` is the same for every choice."""

    answer_id: str
    model: str
    created: int
    fingerprint: str
    is_chat: bool
    finish_reason: str
    num_choices: int
    num_sequences: int
    _started: set[int] = field(default_factory=set)

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        texts: list[list[str]] = [[] for _ in range(self.num_sequences)]
        tally = Tally(self.num_choices)
        async for pieces in generation.pieces():
            for piece in pieces:
                texts[piece.index].append(piece.text)
                if piece.finished is not None:
                    tally.count(piece.index, piece.finished)
        choices = [self._choice(index, "".join(parts)) for index, parts in enumerate(texts)]
        return self._envelope("", choices) | {"usage": tally.usage()}

    async def events(self, generation: Generation, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
        """The chunks of a stream, one for each token, and its end."""
        tally = Tally(self.num_choices)
        async for pieces in generation.pieces():
            yield b"".join(chunk for piece in pieces for chunk in self._chunks(piece))
            for piece in pieces:
                if piece.finished is not None:
                    tally.count(piece.index, piece.finished)
        if include_usage:
            yield server_sent(self._envelope(".chunk", []) | {"usage": tally.usage()})
        yield b"data: [DONE]\n\n"

    def _chunks(self, piece: Piece) -> list[bytes]:
        chunks = []
        if self.is_chat and piece.index not in self._started:
            self._started.add(piece.index)
            role = {"index": piece.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            chunks.append(server_sent(self._envelope(".chunk", [role])))
        reason = self.finish_reason if piece.finished else None
        text = {"delta": {"content": piece.text}} if self.is_chat else {"text": piece.text}
        choice = {"index": piece.index, **text, "logprobs": None, "finish_reason": reason}
        return [*chunks, server_sent(self._envelope(".chunk", [choice]))]

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return {"index": index, **content, "logprobs": None, "finish_reason": self.finish_reason}

    def _envelope(self, chunk: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": f"chat.completion{chunk}" if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }
