"""ShareGPT conversations, as vLLM's and SGLang's benchmarks read them: one JSON array, or one conversation a line.

Each answer of a conversation is a request; its prompt is all that was said before, so that requests of a conversation
are a session, each the parent of the next (a closed loop). Its output is as long as the answer has words and signs (the
built-in tokenizer), because the file has no model's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import msgspec

from preble.errors import TraceFormatError
from preble.lab.workloads.lines import decoded_lines, numbered_lines
from preble.lab.workloads.loaders.assemble import assembled, workload_name
from preble.lab.workloads.loaders.chat import ASSISTANT, ChatMessage, ChatSegments
from preble.lab.workloads.loaders.options import LoadOptions
from preble.lab.workloads.model import Workload, WorkloadRequest
from preble.prompts.words import word_tokens

EXAMPLE = '{"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]}'
_ROLES = MappingProxyType(
    {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT, "bard": ASSISTANT}
)
"""ShareGPT's words for who speaks; others stay as they are."""
_SPEAKERS = ("user", ASSISTANT)
"""They take turns in a conversation that does not say who speaks, as in SGLang's custom data sets."""


class _Turn(msgspec.Struct, frozen=True):
    """ShareGPT says from and value, SGLang's custom data sets role and content."""

    sender: str | None = msgspec.field(name="from", default=None)
    value: str | None = None
    role: str | None = None
    content: str | None = None


class _Conversation(msgspec.Struct, frozen=True):
    conversations: list[_Turn] | None = None
    conversation: list[_Turn] | None = None


def read_sharegpt(path: Path, options: LoadOptions) -> Workload:
    """Raises: TraceFormatError."""
    chat = ChatSegments()
    sessions = [
        list(_session(f"{workload_name(path)}-{number}", _messages(place, conversation), chat))
        for number, (place, conversation) in enumerate(_conversations(path), start=1)
    ]
    empty = sum(not session for session in sessions)
    note = "ShareGPT conversations, answers as long as they have words and signs"
    left_out = f"; {empty} conversations without an answer left out" if empty else ""
    return assembled(path, [request for session in sessions for request in session], note + left_out)


def _conversations(path: Path) -> Iterator[tuple[str, _Conversation]]:
    """Yield each with its place in the file, for errors."""
    _, first = next(numbered_lines(path), (1, b""))
    if not first.lstrip().startswith(b"["):
        for number, conversation in decoded_lines(path, _Conversation, EXAMPLE):
            yield f"{path}:{number}", conversation
        return
    try:
        array = b"".join(line for _, line in numbered_lines(path))
        conversations = msgspec.json.decode(array, type=list[_Conversation])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceFormatError(f"{path}: {error}; an item of the array looks like {EXAMPLE}") from error
    for i, conversation in enumerate(conversations):
        yield f"{path}: item {i}", conversation


def _messages(place: str, conversation: _Conversation) -> list[ChatMessage]:
    turns = conversation.conversations if conversation.conversations is not None else conversation.conversation
    if turns is None:
        raise TraceFormatError(f"{place}: there is no conversation; it must look like {EXAMPLE}")
    is_anonymous = not any(turn.sender or turn.role for turn in turns)
    roles = [_SPEAKERS[i % 2] if is_anonymous else turn.sender or turn.role for i, turn in enumerate(turns)]
    return [_message(place, role, turn) for role, turn in zip(roles, turns, strict=True)]


def _message(place: str, role: str | None, turn: _Turn) -> ChatMessage:
    content = turn.value if turn.value is not None else turn.content
    if role is None or content is None:
        raise TraceFormatError(
            f"{place}: a turn says who speaks (from or role) and what (value or content), as in {EXAMPLE}"
        )
    return ChatMessage(_ROLES.get(role, role), content)


def _session(session: str, messages: list[ChatMessage], chat: ChatSegments) -> Iterator[WorkloadRequest]:
    """Yield a request for each answer that something was said before."""
    parent = None
    for turn, message in enumerate(messages):
        if message.role == ASSISTANT and turn > 0:
            request_id = f"{session}.{turn}"
            prompt = chat.prompt(messages[:turn])
            output_tokens = max(1, len(word_tokens(message.content)))
            yield WorkloadRequest(request_id, prompt, output_tokens, session=session, parent=parent)
            parent = request_id
