"""ShareGPT conversations, as vLLM's and SGLang's benchmarks read them: one JSON array, or one conversation a line.

Each answer of a conversation is a request; its prompt is all that was said before, so that requests of a conversation
are a session, each the parent of the next (a closed loop). Its output is as long as the answer has words and signs (the
built-in tokenizer), for a model's tokens are not told.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import msgspec

from preble.errors import TraceFormatError
from preble.workloads.lines import bad_line, decoded_lines, numbered_lines
from preble.workloads.loaders.assemble import assembled, workload_name
from preble.workloads.loaders.chat import ASSISTANT, ChatSegments, Message
from preble.workloads.loaders.options import LoadOptions
from preble.workloads.model import Workload, WorkloadRequest
from preble.workloads.tokens import word_tokens

EXAMPLE = '{"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]}'
_ROLES = MappingProxyType(
    {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT, "bard": ASSISTANT}
)
"""ShareGPT's words for who speaks; others stay as they are."""


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
    note = "ShareGPT conversations; answers as long as they have words and signs"
    requests = [
        request
        for number, conversation in _conversations(path)
        for request in _session(f"{workload_name(path)}-{number}", _messages(path, number, conversation), chat)
    ]
    return assembled(path, requests, note)


def _conversations(path: Path) -> Iterator[tuple[int, _Conversation]]:
    """With the number of the line, or of the item where the file is one array."""
    _, first = next(numbered_lines(path), (1, b""))
    if not first.lstrip().startswith(b"["):
        yield from decoded_lines(path, _Conversation, EXAMPLE)
        return
    try:
        array = b"".join(line for _, line in numbered_lines(path))
        yield from enumerate(msgspec.json.decode(array, type=list[_Conversation]), start=1)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceFormatError(f"{path}: {error}; an item of the array looks like {EXAMPLE}") from error


def _messages(path: Path, number: int, conversation: _Conversation) -> list[Message]:
    turns = conversation.conversations if conversation.conversations is not None else conversation.conversation
    if turns is None:
        raise bad_line(path, number, f"there is no conversation; a line (or item) looks like {EXAMPLE}")
    messages = []
    for turn in turns:
        role, content = turn.sender or turn.role, turn.value if turn.value is not None else turn.content
        if role is None or content is None:
            raise bad_line(path, number, f"a turn needs who speaks (from, role) and what (value, content): {EXAMPLE}")
        messages.append(Message(_ROLES.get(role, role), content))
    return messages


def _session(session: str, messages: list[Message], chat: ChatSegments) -> Iterator[WorkloadRequest]:
    """A request for each answer that something was said before."""
    parent = None
    for turn, message in enumerate(messages):
        if message.role == ASSISTANT and turn > 0:
            request_id = f"{session}.{turn}"
            prompt = chat.prompt(messages[:turn])
            output_tokens = max(1, len(word_tokens(message.content)))
            yield WorkloadRequest(request_id, prompt, output_tokens, session=session, parent=parent)
            parent = request_id
