"""What makes token ids of prompts: the interface of every way."""

from __future__ import annotations

import re
from math import inf
from typing import Protocol

from preble.core.types import PackedTokens
from preble.prompts.endpoints.bodies import KnownPrefix, Text


class PromptEncoder(Protocol):
    """Makes token ids of prompts. Work that takes long runs outside the event loop's thread."""

    async def completion(
        self, text: Text, add_special_tokens: bool, model: str | None, most_tokens: float = inf
    ) -> PackedTokens:
        """`most_tokens`: that a replica takes. Raises: PromptTooLong. RequestError: text or model is not usable."""
        ...

    async def chat(self, body: bytes, model: str | None, most_tokens: float = inf, *, engine: str = "") -> PackedTokens:
        """`most_tokens`: that a replica takes. `engine`: the program that shows the chat to the template.

        Raises: PromptTooLong. RequestError: body or model is not usable."""
        ...


class TokenSource(PromptEncoder, Protocol):
    """Token ids for placing."""

    def begin(self, body: bytes, text_start: re.Pattern[bytes]) -> KnownPrefix | None:
        """Return the text of a body if token ids of its beginning are known, else None. O(what is known).

        `text_start`: matches a body up to the inside of the text.
        """
        ...

    async def complete(self, begun: KnownPrefix, add_special_tokens: bool, most_tokens: float) -> PackedTokens:
        """Return the ids of what this source's `begin` returned, once its end is known. As `completion`.

        May be called again.
        """
        ...

    @property
    def identity(self) -> str:
        """Equal in processes that make the same ids: it names the tokenizer's files as they were read. "" for none."""
        ...

    @property
    def vocabulary(self) -> int | None:
        """Every token id that the model takes is smaller; None if that is not known."""
        ...

    def close(self) -> None:
        """Release threads and processes."""
        ...


class Asker(Protocol):
    """Has a replica tokenize."""

    def path_of(self, model: str | None) -> str:
        """Return what the replicas of a model were started with, "" if that is not known."""
        ...

    async def ask(self, body: bytes, model: str | None) -> PackedTokens | None:
        """Return a replica's own ids for a body, None if no replica has any. Raises: RequestError."""
        ...
