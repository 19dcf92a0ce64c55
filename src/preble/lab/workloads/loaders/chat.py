"""Conversations as text, by a simple template: every message is

    <|role|>
    content

and a prompt ends with the head of the answer, `<|assistant|>` and a new line. The prompt of a later turn so begins with
that of an earlier one, then has the answer to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

from preble.lab.workloads.model import Segment

ASSISTANT = "assistant"


class ChatMessage(NamedTuple):
    role: str
    content: str


class ChatSegments:
    """Segments of conversations; equal texts are one segment, whoever says them.

    >>> segments = ChatSegments().prompt([ChatMessage("user", "Why?")])
    >>> "".join(segment.text or "" for segment in segments)
    '<|user|>\\nWhy?\\n<|assistant|>\\n'
    """

    def __init__(self) -> None:
        self._segments: dict[str, Segment] = {}

    def prompt(self, messages: Iterable[ChatMessage]) -> tuple[Segment, ...]:
        """Return the prompt that asks for the next answer. O(length)."""
        pieces = [piece for message in messages for piece in (_head(message.role), f"{message.content}\n")]
        return tuple(self._segment(piece) for piece in (*pieces, _head(ASSISTANT)))

    def _segment(self, text: str) -> Segment:
        if text not in self._segments:
            digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
            self._segments[text] = Segment(f"text:{digest}", text=text)
        return self._segments[text]


def _head(role: str) -> str:
    return f"<|{role}|>\n"
