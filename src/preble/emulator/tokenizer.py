"""Text to token ids and back for an emulated model: a built-in tokenizer without any files, or a model's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from preble.errors import ConfigError, RequestError
from preble.prompts.words import split_words, word_tokens

EMULATED_TEXT = " This answer is emulated: no model ran, only the time it took is true."
"""Every answer is a stretch of this sentence, repeated."""

Message = Mapping[str, Any]


class EmulatedTokenizer(Protocol):
    """What the emulator needs of a tokenizer. Answers cycle through its output."""

    @property
    def output_ids(self) -> Sequence[int]: ...

    @property
    def output_pieces(self) -> Sequence[str]:
        """The text of each of `output_ids`."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids. Raises: RequestError: they cannot be turned back."""
        ...

    def pieces(self, text: str) -> tuple[list[int], list[str]]:
        """The ids of a text without special tokens, and the text of each."""
        ...

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Any], *, add_generation_prompt: bool) -> str:
        """The prompt's text. Raises: RequestError: the messages are not what the template takes."""
        ...


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
        raise RequestError("the built-in tokenizer cannot turn ids back into text; start the emulator with --tokenizer")

    def pieces(self, text: str) -> tuple[list[int], list[str]]:
        return word_tokens(text), split_words(text)

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Any], *, add_generation_prompt: bool) -> str:
        return plain_chat(messages, tools, add_generation_prompt=add_generation_prompt)


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
        self._special: dict[str, str] = {}
        self._template = self._load_template(file.parent)
        self.output_ids = self.encode(EMULATED_TEXT, add_special_tokens=False)
        self.output_pieces = self._pieces()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids))
        return text

    def pieces(self, text: str) -> tuple[list[int], list[str]]:
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        cuts = [0, *(start for start, _ in encoded.offsets[1:]), len(text)]
        return encoded.ids, [text[a:b] for a, b in pairwise(cuts)]

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Any], *, add_generation_prompt: bool) -> str:
        if self._template is None:
            return plain_chat(messages, tools, add_generation_prompt=add_generation_prompt)
        flat = [{**message, "content": text_of(message)} for message in messages]
        try:
            return self._template.render(
                messages=flat, tools=tools or None, add_generation_prompt=add_generation_prompt, **self._special
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refused the messages: {error}", param="messages") from error

    def _load_template(self, folder: Path) -> jinja2.Template | None:
        settings = folder / "tokenizer_config.json"
        config = msgspec.json.decode(settings.read_bytes()) if settings.is_file() else {}
        own_file = folder / "chat_template.jinja"
        source = own_file.read_text(encoding="utf-8") if own_file.is_file() else config.get("chat_template")
        if not isinstance(source, str):
            return None
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            token = config.get(name)
            self._special[name] = str(token["content"] if isinstance(token, dict) else token or "")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _raise_template_error
        try:
            return environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"cannot compile the chat template in {str(folder)!r}: {error}") from error

    def _pieces(self) -> list[str]:
        """What each output token adds to the text, in the second of two rounds, so that no start is special."""
        count = len(self.output_ids)
        twice = [*self.output_ids, *self.output_ids]
        texts = [self._tokenizer.decode(twice[:i]) for i in range(count, 2 * count + 1)]
        return [texts[i + 1][len(texts[i]) :] for i in range(count)]


def load_tokenizer(path: str | None) -> EmulatedTokenizer:
    """The tokenizer at `path`, the built-in one for None. Raises: ConfigError."""
    return BuiltinTokenizer() if path is None else FileTokenizer(Path(path))


def plain_chat(messages: Sequence[Message], tools: Sequence[Any], *, add_generation_prompt: bool) -> str:
    """Chat markup for models that have no template of their own.

    >>> plain_chat([{"role": "user", "content": "Hi"}], [], add_generation_prompt=True)
    '<|user|>\\nHi\\n<|assistant|>\\n'
    """
    parts = [f"<|tools|>\n{json.dumps(list(tools), ensure_ascii=False)}\n"] if tools else []
    parts += [f"<|{message['role']}|>\n{text_of(message)}\n" for message in messages]
    return "".join(parts) + ("<|assistant|>\n" if add_generation_prompt else "")


def text_of(message: Message) -> str:
    """The text of a message: its content, or the text parts of it. Raises: RequestError: a part is not text."""
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


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)
