"""Answers in the forms of Anthropic's messages, OpenAI's responses, and of engines' own endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from preble.emulator.answers.forms import DONE, Answer, Tally, call_id
from preble.emulator.answers.protocol import server_sent
from preble.emulator.generation import Piece


def named(name: str, /, **data: Any) -> bytes:
    """Return an event with a name, which its data repeat."""
    return f"event: {name}\n".encode() + server_sent({"type": name, **data})


class MessageAnswer(Answer):
    """Of `/v1/messages`."""

    __slots__ = ()

    def _envelope(self, content: list[Any], reason: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.model,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": usage,
        }

    def _usage(self, said: Tally) -> dict[str, Any]:
        return {
            "input_tokens": said.prompt_tokens - said.cached_tokens,
            "cache_read_input_tokens": said.cached_tokens,
            "output_tokens": said.completion_tokens,
        }

    def _reason(self) -> str:
        return {"length": "max_tokens", "tool_calls": "tool_use"}.get(self.finish_reason, "end_turn")

    def body(self, said: Tally) -> Any:
        text = "".join(said.texts[0])
        block: dict[str, Any] = {"type": "text", "text": text}
        if self.tool is not None:
            block = {"type": "tool_use", "id": call_id(self), "name": self.tool, "input": _arguments(text)}
        return self._envelope([block], self._reason(), self._usage(said))

    def piece(self, piece: Piece, so_far: Sequence[str]) -> bytes:
        first = b""
        if len(so_far) == 1:
            block: dict[str, Any] = {"type": "text", "text": ""}
            if self.tool is not None:
                block = {"type": "tool_use", "id": call_id(self), "name": self.tool, "input": {}}
            message = self._envelope([], None, {"input_tokens": 0, "output_tokens": 0})
            first = named("message_start", message=message) + named("content_block_start", index=0, content_block=block)
        delta = {"type": "text_delta", "text": piece.text}
        if self.tool is not None:
            delta = {"type": "input_json_delta", "partial_json": piece.text}
        return first + named("content_block_delta", index=0, delta=delta)

    def closing(self, said: Tally) -> bytes:
        delta = {"stop_reason": self._reason(), "stop_sequence": None}
        return (
            named("content_block_stop", index=0)
            + named("message_delta", delta=delta, usage=self._usage(said))
            + named("message_stop")
        )


def _arguments(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:  # cut off by max_tokens
        return {}


class Response(Answer):
    """Of `/v1/responses`."""

    __slots__ = ()

    def _item(self, text: str, status: str) -> dict[str, Any]:
        name = self.answer_id.removeprefix("resp_")
        if self.tool is not None:
            call = {"name": self.tool, "call_id": call_id(self), "arguments": text}
            return {"id": f"fc_{name}", "type": "function_call", "status": status, **call}
        content = [_output_text(text)] if status != "in_progress" else []
        return {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": content}

    def _envelope(self, output: list[Any], status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "error": None,
            "instructions": None,
            "metadata": {},
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "usage": usage,
        }

    def _status(self) -> str:
        return "incomplete" if self.finish_reason == "length" else "completed"

    def body(self, said: Tally) -> Any:
        usage = {
            "input_tokens": said.prompt_tokens,
            "input_tokens_details": {"cached_tokens": said.cached_tokens},
            "output_tokens": said.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": said.prompt_tokens + said.completion_tokens,
        }
        return self._envelope([self._item("".join(said.texts[0]), self._status())], self._status(), usage)

    def opening(self) -> bytes:
        response = self._envelope([], "in_progress", None)
        return named("response.created", sequence_number=0, response=response) + named(
            "response.in_progress", sequence_number=1, response=response
        )

    def piece(self, piece: Piece, so_far: Sequence[str]) -> bytes:
        item = self._item("", "in_progress")
        place = {"item_id": item["id"], "output_index": 0}
        number = len(so_far) + 3
        first = b""
        if len(so_far) == 1:
            first = named("response.output_item.added", sequence_number=2, output_index=0, item=item)
        if self.tool is not None:
            name = "response.function_call_arguments.delta"
            return first + named(name, sequence_number=number, delta=piece.text, **place)
        place["content_index"] = 0
        if len(so_far) == 1:
            first += named("response.content_part.added", sequence_number=3, part=_output_text(""), **place)
        delta = named("response.output_text.delta", sequence_number=number, delta=piece.text, logprobs=[], **place)
        return first + delta

    def closing(self, said: Tally) -> bytes:
        text = "".join(said.texts[0])
        item = self._item(text, self._status())
        place: dict[str, Any] = {"item_id": item["id"], "output_index": 0}
        number = len(said.texts[0]) + 4
        if self.tool is not None:
            name = "response.function_call_arguments.done"
            done = named(name, sequence_number=number, name=self.tool, arguments=text, **place)
        else:
            place["content_index"] = 0
            done = named("response.output_text.done", sequence_number=number, text=text, logprobs=[], **place)
            part = _output_text(text)
            done += named("response.content_part.done", sequence_number=number + 1, part=part, **place)
        return (
            done
            + named("response.output_item.done", sequence_number=number + 2, output_index=0, item=item)
            + named("response.completed", sequence_number=number + 3, response=self.body(said))
        )


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class Generated(Answer):
    """Of SGLang's `/generate`."""

    __slots__ = ()

    def _of(self, index: int, text: str, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
        reason = {"type": self.finish_reason, **({"length": output_tokens} if self.finish_reason == "length" else {})}
        meta = {
            "id": f"{self.answer_id}-{index}" if self.num_sequences > 1 else self.answer_id,
            "finish_reason": reason,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "cached_tokens": cached_tokens,
        }
        return {"text": text, "meta_info": meta} | ({"index": index} if self.num_sequences > 1 else {})

    def body(self, said: Tally) -> Any:
        shares = (said.prompt_tokens, said.cached_tokens)
        prompt, cached = (share * self.num_choices // self.num_sequences for share in shares)
        answers = [self._of(i, "".join(pieces), prompt, len(pieces), cached) for i, pieces in enumerate(said.texts)]
        return answers if self.num_sequences > 1 else answers[0]

    def piece(self, piece: Piece, so_far: Sequence[str]) -> bytes:
        finished = piece.finished
        counts = (finished.num_prompt_tokens, finished.num_cached_tokens) if finished else (0, 0)
        answer = self._of(piece.index, "".join(so_far), counts[0], len(so_far), counts[1])
        if not finished:
            answer["meta_info"]["finish_reason"] = None
        return server_sent(answer)

    def closing(self, said: Tally) -> bytes:
        return DONE


class GeneratedTokens(Answer):
    """Of vLLM's `/inference/v1/generate`: the ids are those of the pieces."""

    __slots__ = ()

    def _choice(self, index: int, num_tokens: int, reason: str | None) -> dict[str, Any]:
        return {"index": index, "token_ids": [0] * num_tokens, "logprobs": None, "finish_reason": reason}

    def body(self, said: Tally) -> Any:
        choices = [self._choice(i, len(pieces), self.finish_reason) for i, pieces in enumerate(said.texts)]
        return {"request_id": self.answer_id, "model": self.model, "choices": choices, "usage": said.usage()}

    def piece(self, piece: Piece, so_far: Sequence[str]) -> bytes:
        reason = self.finish_reason if piece.finished else None
        return server_sent({"request_id": self.answer_id, "choices": [self._choice(piece.index, 1, reason)]})

    def closing(self, said: Tally) -> bytes:
        last = {"request_id": self.answer_id, "choices": [], "usage": said.usage()}
        return (server_sent(last) if self.include_usage else b"") + DONE
