"""Prompts to token ids, as the engine would make them. Synchronous; `pool` runs it beside the event loop."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog
import tokenizers

from preble.core.types import PackedTokens, pack_tokens
from preble.errors import ConfigError, RequestError
from preble.prompts.endpoints.bodies import Text, decode_chat, decode_text
from preble.prompts.tokens.joints import Joint, find_joint
from preble.prompts.tokens.templates import ModelTemplates, decoded_list, json_file

MODEL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_MOST_QUICK_PARTS = 128
_PROBES = (
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "Ünïcödé — 你好，世界 — Привет — שלום — 🙂👩‍👩‍👧 e\u0301 ﬁ",
    "def f(x):\n\treturn {'a': x ** 2, \"b\": [1, 22, 333, 4444, 55555]}\n\n\n    # comment\r\n",
    "1234567890 3.14159 1,000,000 0xdeadbeef",
    "don't I'LL we've THEY'RE",
    "a" * 300 + " " * 40 + "\n" * 20 + "\u00a0\u2009\ufeff\u200b",
    '<s></s><|im_start|>user<|im_end|>[INST] <|begin_of_text|> <bos> {"k": "\\u00e9"}',
)


class TextEncoder(Protocol):
    """A tokenizer library. `encode` may be called from several threads. `joint`: how ids of pieces are joined."""

    @property
    def joint(self) -> Joint | None: ...

    vocabulary: int
    """Every id is smaller."""

    def encode(self, text: str, add_special_tokens: bool) -> PackedTokens: ...


class PlainEncoder:
    """The `tokenizers` library: right for every model; it keeps the interpreter's lock while it works."""

    joint = None

    def __init__(self, path: Path) -> None:
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise ConfigError(f"tokenizer file {str(path)!r} cannot be used: {error}") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.vocabulary = 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str, add_special_tokens: bool) -> PackedTokens:
        return pack_tokens(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


class FastEncoder:
    """`fastokens`: tens of times faster, releases the interpreter's lock, supports most models.

    Raises, on construction: ImportError, or whatever the library raises on a model that it does not support.
    """

    def __init__(self, path: Path, vocabulary: int) -> None:
        import fastokens  # type: ignore[import-untyped]

        self.joint: Joint | None = None
        self.vocabulary = vocabulary
        self._tokenizer = fastokens.Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, add_special_tokens: bool) -> PackedTokens:
        packed, _ = self._tokenizer.encode_batch_flat([text], add_special_tokens)
        return PackedTokens(packed if sys.byteorder == "little" else _swapped(packed))


def _swapped(packed: bytes) -> bytes:
    ids = array("I", packed)
    ids.byteswap()
    return ids.tobytes()


def choose_encoder(path: Path) -> tuple[TextEncoder, bool]:
    """Return the fastest library with the same ids as `tokenizers` on the probes, and whether it is the fast one.

    Raises: ConfigError: not even `tokenizers` can read the file.
    """
    plain = PlainEncoder(path)
    try:
        fast = FastEncoder(path, plain.vocabulary)
        same = all(
            fast.encode(text, special) == plain.encode(text, special) for text in _PROBES for special in (True, False)
        )
        why = "other ids on the probe texts"
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        same, why = False, f"{type(error).__name__}: {error}"
    if same:
        fast.joint = find_joint(path, plain.tokenizer, fast.encode)
        return fast, True
    structlog.get_logger().info("slow_tokenizer", file=str(path), reason=f"fastokens: {why}")
    return plain, False


class PromptTokenizer:
    """One model's tokenizer and chat template. Immutable after construction; may be used from several threads.

    `identity`: names the contents of its files, as read. `vocabulary`: every token id that the model takes is smaller.
    """

    def __init__(self, folder: Path, chat_template: Path | None = None, tools_bytes: int = 0) -> None:
        """`tools_bytes`: for decoded tools. Raises: ConfigError: a file is missing or cannot be used."""
        files = (*(folder / name for name in MODEL_FILES), *filter(None, [chat_template]))
        digests = [_digest(file) for file in files]
        self.encoder, self.is_fast = choose_encoder(folder / "tokenizer.json")
        self.identity = sha256(repr((self.is_fast, digests)).encode()).hexdigest()
        self.vocabulary = max(self.encoder.vocabulary, _num_embeddings(json_file(folder / "config.json")))
        self._chats = ModelTemplates(folder, chat_template, tools_bytes)

    def completion(self, text: Text, add_special_tokens: bool = True) -> PackedTokens:
        """Return token ids of a text prompt. Raises: RequestError: the text is not Unicode."""
        try:
            return self.encoder.encode(text if isinstance(text, str) else decode_text(text), add_special_tokens)
        except UnicodeEncodeError as error:
            raise RequestError("`prompt` has half of a surrogate pair", param="prompt") from error

    def piece(self, piece: str | bytes) -> PackedTokens:
        """Return token ids of a piece (`pieces.cut`) alone. Raises: RequestError: it is not Unicode."""
        return self.completion(piece if isinstance(piece, str) else unescaped(piece), False)

    def chat(self, body: bytes, engine: str = "") -> PackedTokens:
        """Return token ids of a chat body, as an engine makes them. Raises: RequestError: the body, or what the
        template says of it.
        """
        return self.completion(*self.chat_text(body, engine))

    def chat_text(self, body: bytes, engine: str = "") -> tuple[str, bool]:
        """Return the prompt's text of a chat body, and whether it gets special tokens. Raises: RequestError."""
        parsed = decode_chat(body)
        return self._chats.render(parsed, engine), parsed.add_special_tokens

    def quick_chat_text(self, body: bytes, engine: str = "") -> tuple[str, bool] | None:
        """Do as `chat_text`, but return None if that may take more than about a millisecond. For small bodies."""
        parsed = decode_chat(body)
        is_known = self._chats.knows_tools(parsed, engine)
        others = (parsed.documents,) if is_known else (parsed.documents, parsed.tools)
        if any(map(_has_many_objects, (parsed.messages, *others))):
            return None
        messages = decoded_list(parsed.messages, "messages") or []
        if _num_parts(messages) > _MOST_QUICK_PARTS:
            return None
        return self._chats.render(parsed, engine, messages), parsed.add_special_tokens


def _digest(file: Path) -> str:
    try:
        return sha256(file.read_bytes()).hexdigest()
    except OSError:  # most models lack some; whoever needs it complains
        return ""


def unescaped(inside: bytes) -> str:
    """Return the text of the inside of a JSON string. Raises: RequestError: it is not UTF-8."""
    return decode_text(b'"%b"' % inside)


def _has_many_objects(raw: msgspec.Raw) -> bool:
    """Return whether decoding this may take long: it may have more objects and lists than `_MOST_QUICK_PARTS`."""
    data = bytes(raw)  # `count` would be slower
    return any(len(data.split(mark, _MOST_QUICK_PARTS)) > _MOST_QUICK_PARTS for mark in (b"{", b"["))


def _num_parts(messages: list[Any]) -> int:
    """Return how many messages, parts of their contents and tool calls there are. Each takes up to 5 us to render.

    >>> _num_parts([{"content": "a"}, {"content": ["b", {"type": "text"}], "tool_calls": [{}]}])
    5
    """
    count = len(messages)
    for message in messages:
        if isinstance(message, dict):
            content, calls = message.get("content"), message.get("tool_calls")
            count += (len(content) if isinstance(content, list) else 0) + (len(calls) if isinstance(calls, list) else 0)
    return count


def _num_embeddings(config: dict[str, Any]) -> int:
    """Return how many token ids the model takes: more than its tokenizer makes, where its tables are padded."""
    sizes = (part.get("vocab_size") for part in (config, config.get("text_config")) if isinstance(part, dict))
    return max((size for size in sizes if isinstance(size, int)), default=0)


def find_model_files(name: str, download: Callable[..., str] | None = None) -> Path:
    """Return the folder with the tokenizer of a local path or a hub name. May use the network.

    `download`: huggingface_hub's `snapshot_download` unless given.
    Raises: ConfigError: neither a folder with a tokenizer.json nor a model on the hub.
    """
    folder = local_model_files(name)
    return _with_tokenizer(name, _downloaded(name, download)) if folder is None else folder


def local_model_files(name: str) -> Path | None:
    """Return the folder with the tokenizer of a local path, None for a name on the hub.

    Raises: ConfigError: a path that is not there, or without a tokenizer.json.
    """
    path = Path(name).expanduser()
    if path.exists():
        return _with_tokenizer(name, path.parent if path.name == "tokenizer.json" else path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"tokenizer {name!r}: no such folder; give the model's folder, or its name on the hub")
    return None


def _with_tokenizer(name: str, folder: Path) -> Path:
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"tokenizer {name!r}: there is no tokenizer.json; give a model with a fast tokenizer")
    return folder


def _downloaded(name: str, download: Callable[..., str] | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path((download or snapshot_download)(name, allow_patterns=list(MODEL_FILES)))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"tokenizer {name!r}: no such folder, and the hub does not provide it: {reason}. Give a folder with a "
            "tokenizer.json, or leave the tokenizer out: the replicas then tokenize"
        ) from error
