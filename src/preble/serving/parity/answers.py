"""Completions that the gateway asks for itself: whether token ids are answered as their text is, and copies."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from msgspec import Struct

from preble.core.types import TOKEN_BYTES, PackedTokens, unpack_tokens
from preble.engines.adapter import Engine
from preble.engines.awaited import AwaitedAnswer
from preble.engines.pairs import PairedEngine
from preble.engines.vllm.client import copy_source
from preble.errors import EngineProtocolError, EngineRefused
from preble.prompts.endpoints import COMPLETIONS
from preble.prompts.endpoints.answers import decoded_answer
from preble.prompts.endpoints.ids import with_ids
from preble.prompts.tokens import PromptEncoder
from preble.prompts.tokens.pieces import PIECE_SIZE
from preble.serving.parity.report import Check, Finding, ParityOutcome, compare_ids, mismatch, unchecked

MAX_ANSWER_BYTES = 1024 * 1024
ATTEMPTS = 3
"""Answers compared before a difference is believed: what else a busy replica computes may change a close choice."""

PROSE = (
    "The quick brown fox jumps over the lazy dog while five wizards vex a bold queen. Numbers such as 3.14159, 2718 or"
    " 1,000,000 cost more tokens than words do, and so does code: def area(r): return 3 * r ** 2  # about right"
)
SPECIAL = (
    "Ünïcödé — 你好，世界 — Привет — שלום — 🙂👩‍👩‍👧 e\u0301\r\n\t  <s></s><|im_start|>user<|im_end|><|endoftext|>"
    "<|begin_of_text|><|bos|><|eot_id|>[INST]<bos><eos>"
)

ONE_IN = 997
"""Characters of Unicode, in `every_script`. A prime, so that they differ in their place within a block."""


class AnswerUsage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class AnswerChoice(Struct):
    text: str
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None


class ComparedAnswer(Struct):
    """What must be equal in the answers to a text and to its ids."""

    choices: list[AnswerChoice]
    usage: AnswerUsage | None = None


_COMPLETION = msgspec.json.Decoder(ComparedAnswer)


def every_script() -> str:
    """Return a text of characters from all over Unicode, with digits and blanks in between. About 700 tokens.

    >>> 400 < len(every_script()) < 1000
    True
    """
    codes = [code for code in range(0x21, 0x1FAFF, ONE_IN) if not 0xD800 <= code < 0xE000]
    blanks = (" ", "  ", "\n", "\t", "'s ", "\n\n    ", "")
    return "".join(f"{chr(code)}{i}{blanks[i % len(blanks)]}" for i, code in enumerate(codes))


def in_pieces() -> str:
    """Return a text that is long enough for its ids to be made in pieces.

    >>> len(in_pieces()) > 2 * PIECE_SIZE
    True
    """
    return " ".join([PROSE] * (2 * PIECE_SIZE // len(PROSE) + 1))


async def answers_alike(engine: Engine, model: str, encoder: PromptEncoder, longest: float) -> Finding:
    """Return whether a replica answers texts as it answers the ids that `encoder` makes of them, under greedy decoding.

    It must also report the ids that it makes of a text itself, and they must be the same. `longest`: prompt, in tokens,
    that it takes. Raises: EngineError, RequestError.
    """
    for text in (PROSE, SPECIAL, every_script()):
        ids = await encoder.completion(text, True, model)
        if len(ids) // TOKEN_BYTES >= longest:
            return unchecked(Check.IDS, f"the replica has no room for {len(ids) // TOKEN_BYTES} tokens")
        finding = await _answered_alike(engine, model, text, ids)
        if finding.outcome is not ParityOutcome.VERIFIED:
            return finding
    return await _same_in_pieces(engine, model, encoder)


async def _same_in_pieces(engine: Engine, model: str, encoder: PromptEncoder) -> Finding:
    """Return whether the replica makes the same ids of a text that the gateway cuts up. It computes nothing."""
    text = in_pieces()
    theirs = await engine.tokenize(msgspec.json.encode({"model": model, "prompt": text, "add_special_tokens": True}))
    for _ in range(2):  # only pieces that came before are tokenized one by one
        finding = compare_ids(Check.IDS, unpack_tokens(await encoder.completion(text, True, model)), theirs)
        if finding.outcome is not ParityOutcome.VERIFIED:
            break
    return finding


async def _answered_alike(engine: Engine, model: str, text: str, ids: PackedTokens) -> Finding:
    fields = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    body = msgspec.json.encode(fields)
    in_ids = await with_ids(COMPLETIONS.path, body, ids)
    for _ in range(ATTEMPTS):
        to_text, to_ids = [decoded_answer(_COMPLETION, await completed(engine, b), "text") for b in (body, in_ids)]
        theirs = to_text.choices[0].prompt_token_ids if to_text.choices else None
        if theirs is None:
            return unchecked(Check.IDS, "the replica does not report the ids that it makes of a text")
        finding = compare_ids(Check.IDS, unpack_tokens(ids), theirs)
        if finding.outcome is not ParityOutcome.VERIFIED or to_text == to_ids:
            return finding
    said = f"to a text it answers {_shown(to_text)}, to the text's token ids {_shown(to_ids)}"
    return mismatch(Check.IDS, said)


def _shown(answer: ComparedAnswer) -> str:
    texts, count = [choice.text[:40] for choice in answer.choices], answer.usage
    return f"{texts!r} ({'no usage' if count is None else f'{count.prompt_tokens} prompt tokens'})"


async def copy_prefix(
    engine: Engine, model: str, prefix: PackedTokens, source: Engine, salt: str | None = None
) -> int | None:
    """Have a replica copy a prefix, all tokens but the last. Returns how many it has cached then, None if it does not
    say. Where the two split requests, `engine` is both, and this is a split with one token out. Raises: EngineError:
    among others, `source` sends no KV now."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(unpack_tokens(prefix)),
        "max_tokens": 1,
        "temperature": 0,
    }
    if not isinstance(engine, PairedEngine):
        if source.kv_peer is None or source.rests_until > asyncio.get_running_loop().time():
            raise EngineRefused(f"{source.url} sends no KV now")
        body["kv_transfer_params"] = copy_source(source.kv_peer)
    if salt is not None:
        body["cache_salt"] = salt
    usage = COMPLETIONS.usage(await completed(engine, msgspec.json.encode(body)))
    return None if usage is None else usage.cached_tokens


def answered_text(answer: bytes) -> str:
    """Return the text of a completion. Raises: EngineProtocolError: it is none."""
    choices = decoded_answer(_COMPLETION, answer, "text").choices
    return choices[0].text if choices else ""


async def completed(engine: Engine, body: bytes) -> bytes:
    """Return a replica's whole answer to a completion. Raises: EngineError: among others, it refuses it."""
    async with engine.send(COMPLETIONS.path, body, {}) as response:
        answer = await _whole(response)
        if response.status != 200:
            raise EngineRefused(f"the replica answers a completion of the check with status {response.status}")
    return answer


async def _whole(response: AwaitedAnswer) -> bytes:
    """Raises: EngineError, among them EngineProtocolError: it is too long to be the answer."""
    answer = bytearray()
    async for chunk in response.chunks():
        answer += chunk
        if len(answer) > MAX_ANSWER_BYTES:
            raise EngineProtocolError(f"the replica answers one token with more than {MAX_ANSWER_BYTES} bytes")
    return bytes(answer)
