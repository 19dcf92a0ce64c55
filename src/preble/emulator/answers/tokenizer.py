"""Text to token ids and back for an emulated model: a built-in tokenizer without any files, or a model's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from preble.errors import ConfigError, RequestError
from preble.prompts.endpoints.bodies import ChatBody
from preble.prompts.tokens.templates import ModelTemplates, decoded_list
from preble.prompts.words import split_words, word_tokens

EMULATED_TEXT = " This answer is emulated: no model ran, only the time it took is true."
"""Every answer is a stretch of this sentence, repeated."""

Message = Mapping[str, Any]


class BuiltinTokenizer:
    """Words, spaces and signs, each a token whose id is a stable hash of it. The same text always has the same ids.

    >>> tokenizer = BuiltinTokenizer()
    >>> ids = tokenizer.encode("One word, two", add_special_tokens=True)
    >>> len(ids), ids == tokenizer.encode("One word", add_special_tokens=True) + tokenizer.encode(", two")
    (4, True)
    """

    def __init__(self) -> None:
        self.output_pieces = split_words(EMULATED_TEXT)
        self.output_ids = self.encode(EMULATED_TEXT)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return word_tokens(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Raises: RequestError."""
        raise RequestError("the built-in tokenizer cannot turn ids back into text; start the emulator with --tokenizer")

    def pieces(self, text: str) -> tuple[list[int], list[str]]:
        return word_tokens(text), split_words(text)

    def render_chat(self, messages: Sequence[Message], chat: ChatBody) -> str:
        return plain_chat(messages, chat)


class FileTokenizer:
    """A model's own `tokenizer.json`, with its chat template where the folder has one."""

    def __init__(self, path: Path) -> None:
        """Raises: ConfigError: there is no tokenizer, or it cannot be used."""
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"no tokenizer at {str(file)!r}; give a folder with tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:
            raise ConfigError(f"cannot load tokenizer {str(file)!r}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._templates = ModelTemplates(file.parent)
        self.output_ids = self.encode(EMULATED_TEXT, add_special_tokens=False)
        self.output_pieces = self._pieces()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids))
        return text

    def pieces(self, text: str) -> tuple[list[int], list[str]]:
        """Return the ids of a text without special tokens, and the text of each."""
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        cuts = [0, *(start for start, _ in encoded.offsets[1:]), len(text)]
        return encoded.ids, [text[a:b] for a, b in pairwise(cuts)]

    def render_chat(self, messages: Sequence[Message], chat: ChatBody) -> str:
        """Return the prompt's text. `chat`: without its messages. Raises: RequestError: the template refuses it."""
        if not self._templates.is_there:
            return plain_chat(messages, chat)
        return self._templates.render(chat, messages=list(messages))

    def _pieces(self) -> list[str]:
        """Return what each output token adds to the text, in the second of two rounds, so that no start is special."""
        count = len(self.output_ids)
        twice = [*self.output_ids, *self.output_ids]
        texts = [self._tokenizer.decode(twice[:i]) for i in range(count, 2 * count + 1)]
        return [texts[i + 1][len(texts[i]) :] for i in range(count)]


EmulatedTokenizer = BuiltinTokenizer | FileTokenizer
"""Answers cycle through its `output_ids`, each of which has its text in `output_pieces`."""


def load_tokenizer(path: str | None) -> EmulatedTokenizer:
    """Return the tokenizer at `path`, the built-in one for None. Raises: ConfigError."""
    return BuiltinTokenizer() if path is None else FileTokenizer(Path(path))


def plain_chat(messages: Sequence[Message], chat: ChatBody) -> str:
    """Chat markup for models that have no template of their own.

    >>> plain_chat([{"role": "user", "content": "Hi"}], ChatBody())
    '<|user|>\\nHi\\n<|assistant|>\\n'
    """
    tools = decoded_list(chat.tools, "tools")
    parts = [f"<|tools|>\n{json.dumps(tools, ensure_ascii=False)}\n"] if tools else []
    parts += [f"<|{message['role']}|>\n{text_of(message)}\n" for message in messages]
    return "".join(parts) + ("<|assistant|>\n" if chat.add_generation_prompt else "")


def text_of(message: Message) -> str:
    """Return the text of a message: its content, or the text parts of it. Raises: RequestError: a part is not text."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise RequestError("a part of a message must have a text or be an image or the like", param="messages")
