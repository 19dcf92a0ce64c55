"""Tokenizing beside the event loop: by a local tokenizer in threads or processes, or by asking a replica."""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import cache
from math import inf
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from preble import background
from preble.core.types import TOKEN_BYTES, PackedTokens, ReplicaId, pack_tokens
from preble.engines.adapter import Engine
from preble.errors import EngineError, EngineProtocolError, EngineRefused, prompt_too_long
from preble.prompts.endpoints.bodies import KnownPrefix, Text, decode_chat, decode_text
from preble.prompts.tokens.joints import Joint
from preble.prompts.tokens.media import TokensWithMedia
from preble.prompts.tokens.pieces import MOST_AT_ONCE, PIECE_SIZE, Parts, PieceMemory
from preble.prompts.tokens.source import Asker
from preble.prompts.tokens.tokenizer import PromptTokenizer, unescaped

_GIANT_BYTES = 1024 * 1024
"""Prompts above this have a lane of their own."""
_LETTERS_PER_TOKEN = 4
"""A text with more letters than this for each token that a replica takes is counted in pieces first."""
_PIECE_LETTERS = 64 * 1024
_MOST_ADDED_BY_A_CUT = 16
_TURN_S = 0.0005
"""How long a prompt in parts may hold the event loop; it may go over by one part. A part above `MOST_AT_ONCE`, as of a
text without words, goes to a thread."""
_RENDERED_AT_ONCE_BYTES = 128 * 1024
"""Rendering a chat of this size takes about a millisecond at most, if it has few parts."""

T = TypeVar("T")
Source = tuple[Path, Path | None, int]
"""What `_loaded` takes."""
_TOOLS_SHARE = 16
"""One part in this many of the memory is for decoded tools."""


class _Lane:
    """Threads or processes for tokenizing, started at the first job. Replaced if a process dies."""

    def __init__(self, new_executor: Callable[[], Executor]) -> None:
        self._new_executor = new_executor
        self._executor: Executor | None = None

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Run a job; once more in a new executor if its process has died."""
        loop = asyncio.get_running_loop()
        if self._executor is None:
            self._executor = self._new_executor()
        executor = self._executor
        try:
            return await loop.run_in_executor(executor, function, *args)
        except BrokenExecutor:
            if executor is self._executor:
                structlog.get_logger().error("tokenizer_worker_died")
                self._executor = self._new_executor()
                executor.shutdown(wait=False)
            return await loop.run_in_executor(self._executor, function, *args)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


class LocalTokens(TokensWithMedia):
    """The model's own tokenizer.

    With the fast library, small prompts are done at once: that takes less time than a thread. Long ones are done in
    pieces where the tokenizer allows it: those seen before are remembered, the others are tokenized between two turns
    of the event loop. Where it does not allow it they go to threads, since that library releases the interpreter's
    lock; the slow library does not, so its prompts go to processes.

    A text that is surely too long is refused before it is tokenized whole. Very long prompts go one after the
    other, so that they never delay other prompts.
    """

    def __init__(
        self,
        folder: Path,
        chat_template: Path | None,
        *,
        inline_bytes: int,
        workers: int,
        memory_bytes: int = 0,
        engines: Asker | None = None,
    ) -> None:
        """`memory_bytes`: for ids of pieces and for tools; 0 for neither. `engines`: asked about media.

        Raises: ConfigError: it cannot be used."""
        super().__init__(engines)
        tools_bytes = memory_bytes // _TOOLS_SHARE
        self._source = (folder, chat_template, tools_bytes)
        self._tokenizer = _loaded(*self._source)
        self.identity = self._tokenizer.identity
        self.vocabulary = self._tokenizer.vocabulary
        self._joint = self._tokenizer.encoder.joint if memory_bytes else None
        self._memory = PieceMemory(memory_bytes - tools_bytes)
        self._inline_bytes = inline_bytes if self._tokenizer.is_fast else -1
        self._lane = _Lane(lambda: self._new_executor(workers))
        self._giants = _Lane(lambda: self._new_executor(1))
        self._giants_turn = asyncio.Lock()

    def _new_executor(self, workers: int) -> Executor:
        if self._tokenizer.is_fast:
            return ThreadPoolExecutor(workers, thread_name_prefix="tokenize")
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(workers, spawn, _begin_worker, self._source)

    def begin(self, body: bytes, text_start: re.Pattern[bytes]) -> KnownPrefix | None:
        if self._joint is None or len(body) <= 2 * PIECE_SIZE or (start := text_start.match(body)) is None:
            return None
        parts = Parts(self._memory, body, start.end(), len(body), drop_space=self._joint.drop_space)
        known = parts.begin()
        return KnownPrefix(body, start.end(), known, parts) if known > start.end() else None

    async def completion(
        self, text: Text, add_special_tokens: bool, model: str | None, most_tokens: float = inf
    ) -> PackedTokens:
        size = len(text) if isinstance(text, str) else memoryview(text).nbytes
        if self._joint is not None and size > 2 * PIECE_SIZE:
            whole, quote = (text, 0) if isinstance(text, str) else (bytes(text), 1)
            parts = Parts(self._memory, whole, quote, size - quote, drop_space=self._joint.drop_space)
            return await self._in_parts(parts, size, self._joint, add_special_tokens, most_tokens)
        if size <= self._inline_bytes:
            return self._tokenizer.completion(text, add_special_tokens)
        if size > _LETTERS_PER_TOKEN * most_tokens:
            text = text if isinstance(text, str) else decode_text(text)
            await self._check_length(text, most_tokens)
        return await self._elsewhere(size, PromptTokenizer.completion, text, add_special_tokens)

    async def complete(self, begun: KnownPrefix, add_special_tokens: bool, most_tokens: float) -> PackedTokens:
        assert self._joint is not None, "another source has begun this text"
        parts, begun.parts = begun.parts, None  # they can be taken once
        if isinstance(parts, Parts):
            parts.end = begun.end
        else:
            parts = Parts(self._memory, begun.body, begun.start, begun.end, drop_space=self._joint.drop_space)
        return await self._in_parts(parts, begun.end - begun.start, self._joint, add_special_tokens, most_tokens)

    async def _in_parts(
        self, parts: Parts, size: int, joint: Joint, add_special_tokens: bool, most_tokens: float
    ) -> PackedTokens:
        """Tokenize in parts; a giant at its turn. Gives up the event loop in between. Raises: as `completion`."""
        if size <= _GIANT_BYTES:
            return await self._turns(parts, joint, add_special_tokens, most_tokens)
        async with self._giants_turn:
            return await self._turns(parts, joint, add_special_tokens, most_tokens)

    async def _turns(self, parts: Parts, joint: Joint, add_special_tokens: bool, most_tokens: float) -> PackedTokens:
        found = [joint.before] if add_special_tokens else []
        until = time.perf_counter() + _TURN_S
        while not parts.is_over:
            for part, ids, is_shared in parts.step():
                if ids is None:
                    small = len(part) <= MOST_AT_ONCE
                    ids = self._tokenizer.piece(part) if small else await self._long_piece(part, most_tokens)
                    if is_shared:
                        self._memory.put(part, ids)
                found.append(ids)
                if time.perf_counter() > until:
                    _check_number(found, most_tokens)
                    await asyncio.sleep(0)
                    until = time.perf_counter() + _TURN_S
            _check_number(found, most_tokens)
        if add_special_tokens:
            found.append(joint.after)
        return PackedTokens(b"".join(found))

    async def _long_piece(self, piece: str | bytes, most_tokens: float) -> PackedTokens:
        if len(piece) > _LETTERS_PER_TOKEN * most_tokens:
            await self._check_length(piece if isinstance(piece, str) else unescaped(piece), most_tokens)
        return await self._elsewhere(len(piece), PromptTokenizer.piece, piece)

    async def chat_of_texts(self, body: bytes, model: str | None, most_tokens: float, engine: str) -> PackedTokens:
        is_short = len(body) <= _LETTERS_PER_TOKEN * most_tokens
        if self._joint is None and is_short and len(body) > self._inline_bytes:
            return await self._elsewhere(len(body), PromptTokenizer.chat, body, engine)
        most = self._inline_bytes if self._joint is None else max(self._inline_bytes, _RENDERED_AT_ONCE_BYTES)
        rendered = self._tokenizer.quick_chat_text(body, engine) if len(body) <= most else None
        if rendered is None:
            rendered = await self._elsewhere(len(body), PromptTokenizer.chat_text, body, engine)
        return await self.completion(*rendered, model, most_tokens)

    async def _check_length(self, text: str, most_tokens: float) -> None:
        """Count in pieces until there are surely too many tokens. Raises: PromptTooLong."""
        count = 0
        for start in range(0, len(text), _PIECE_LETTERS):
            piece = text[start : start + _PIECE_LETTERS]
            tokens = await self._elsewhere(len(piece), PromptTokenizer.completion, piece, False)
            # A cut in the middle of a token makes more of it.
            count += len(tokens) // TOKEN_BYTES - _MOST_ADDED_BY_A_CUT
            if count > most_tokens:
                raise prompt_too_long(count, most_tokens)

    async def _elsewhere(self, size: int, method: Callable[..., T], *args: object) -> T:
        """Call a method of the tokenizer in a thread or process."""
        lane = self._giants if size > _GIANT_BYTES else self._lane
        if self._tokenizer.is_fast:
            return await lane.run(method, self._tokenizer, *args)
        return await lane.run(_in_worker, self._source, method, *args)

    def close(self) -> None:
        self._lane.close()
        self._giants.close()


def _check_number(found: list[PackedTokens], most_tokens: float) -> None:
    """Raises: PromptTooLong."""
    if (num_tokens := sum(map(len, found)) // TOKEN_BYTES) > most_tokens:
        raise prompt_too_long(num_tokens, most_tokens)


@cache
def _loaded(folder: Path, chat_template: Path | None, tools_bytes: int) -> PromptTokenizer:
    """Return the tokenizer, loaded once a process. Raises: ConfigError."""
    return PromptTokenizer(folder, chat_template, tools_bytes)


def _begin_worker(folder: Path, chat_template: Path | None, tools_bytes: int) -> None:
    """Load the tokenizer; leave Ctrl-C to the gateway; end when the gateway has, however it ended."""
    background.end_with_parent()
    _loaded(folder, chat_template, tools_bytes)


def _in_worker(source: Source, method: Callable[..., T], *args: object) -> T:
    return method(_loaded(*source), *args)


class EngineTokens(TokensWithMedia):
    """The replicas' own `/tokenize`, each asked in turn. An engine's own ids are right by definition.

    `engines_for`: the live replicas that serve a model. `suspect`: called for each replica that did not answer at all.
    Where no replica answers, as servers without that endpoint do, token ids are approximated: prefixes then still
    match each other, though not the replicas' KV events.
    """

    identity = ""
    vocabulary = None

    def __init__(
        self, engines_for: Callable[[str | None], Iterable[Engine]], suspect: Callable[[ReplicaId], None]
    ) -> None:
        super().__init__(self)
        self._engines_for = engines_for
        self._suspect = suspect
        self._turn = 0
        self._has_warned = False

    def begin(self, body: bytes, text_start: re.Pattern[bytes]) -> None:
        """Do nothing: nothing is remembered."""

    async def complete(self, begun: KnownPrefix, add_special_tokens: bool, most_tokens: float) -> PackedTokens:
        raise NotImplementedError("no text is begun here")

    async def completion(
        self, text: Text, add_special_tokens: bool, model: str | None, most_tokens: float = inf
    ) -> PackedTokens:
        text = text if isinstance(text, str) else decode_text(text)
        named = {} if model is None else {"model": model}  # SGLang takes no null for it
        fields = named | {"prompt": text, "add_special_tokens": add_special_tokens}
        tokens = await self.ask(msgspec.json.encode(fields), model)
        return approximate_tokens(text.encode()) if tokens is None else tokens

    async def chat_of_texts(self, body: bytes, model: str | None, most_tokens: float, engine: str) -> PackedTokens:
        tokens = await self.ask(body, model)
        if tokens is not None:
            return tokens
        parsed = decode_chat(body)
        return approximate_tokens(bytes(parsed.tools) + bytes(parsed.messages))

    async def ask(self, body: bytes, model: str | None) -> PackedTokens | None:
        """Return a replica's own ids for a body, None if no replica has any. Raises: RequestError."""
        engines = list(self._engines_for(model))
        self._turn += 1
        for i in range(len(engines)):
            engine = engines[(self._turn + i) % len(engines)]
            try:
                return pack_tokens(await engine.tokenize(body))
            except EngineError as error:
                # A replica that refuses may only lack the endpoint, which is no reason to check it each time.
                if not isinstance(error, (EngineRefused, EngineProtocolError)):
                    self._suspect(engine.replica_id)
                self._warn(error)
        return None

    def path_of(self, model: str | None) -> str:
        return next((engine.model_path for engine in self._engines_for(model) if engine.model_path), "")

    def _warn(self, error: EngineError) -> None:
        if not self._has_warned:
            self._has_warned = True
            structlog.get_logger().warning("tokens_approximated", error=str(error), hint="give the gateway a tokenizer")

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def stand_in_tokens(count: int) -> PackedTokens:
    """Return `count` tokens, at least one, for a prompt whose text is unknown."""
    return PackedTokens(b" " * (TOKEN_BYTES * max(count, 1)))


def approximate_tokens(text: bytes) -> PackedTokens:
    """Return one token for each four bytes of text, about as many as tokenizers make of prose. Spaces fill the last.

    >>> approximate_tokens(b"hello") == b"hello   "
    True
    """
    return PackedTokens(text + b" " * (-len(text) % TOKEN_BYTES))
