"""Whether a tokenizer gives the pieces of a text, cut between words, the same ids as the whole text.

A cut is before a space between two ASCII letters (`pieces.TEXT_CUT`). The ids are the same where

- no added token has a cut inside, or a letter or one space at an end: then none reaches over a cut or strips its space;
- the normalizer changes each character by itself, or composes them (which spaces and ASCII letters never do);
- the pre-tokenizer ends a word at each cut, or no token of the vocabulary has a letter before a space;
- the model is byte-pair encoding without dropout, which then never merges over a cut.

The rules are read from tokenizer.json. Probes with what people write around two words then decide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, pairwise, product
from pathlib import Path
from string import ascii_letters
from typing import Any

import msgspec
import tokenizers
from msgspec import Struct

from preble.core.types import TOKEN_BYTES, PackedTokens
from preble.prompts.tokens.pieces import TEXT_CUT

Encode = Callable[[str, bool], PackedTokens]
"""Returns the token ids of a text. The flag: whether to add special tokens."""

_SPACE = "▁"
_UNSAFE_ENDS = frozenset(f"{ascii_letters} {_SPACE}")
_LETTER_THEN_SPACE = re.compile(f"[A-Za-z][ {_SPACE}Ġ]")
_CHARACTER_BY_CHARACTER = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase"})
_WORDS = ("ab cd", "The a", "it Is", "zz Z", "re ll ve", "eX tD", "don S")
_MOST_PROBED = 200
"""Of a tokenizer's added tokens."""
_AROUND = (
    *("", "   ", "\n\n", "\r\n", "23", "4567", "''", "'s", "#!", "क्"),
    *" \n\t1.,'-_()$|/\\<>éÉß你。한ش\u0301\u200d\u00a0🙂▁",
)


@dataclass(frozen=True, slots=True)
class Joint:
    """How to join ids of pieces. `before`, `after`: the special tokens around a prompt. `drop_space`: a piece after a
    cut is tokenized without its first space, which the tokenizer adds itself."""

    before: PackedTokens
    after: PackedTokens
    drop_space: bool


class _Added(Struct):
    content: str


class _Model(Struct):
    type: str = ""
    vocab: Any = None
    dropout: float | None = None
    fuse_unk: bool | None = None
    ignore_merges: bool | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _File(Struct):
    model: _Model
    added_tokens: list[_Added] = []
    normalizer: dict[str, Any] | None = None


def find_joint(path: Path, plain: tokenizers.Tokenizer, encode: Encode) -> Joint | None:
    """Return how to join the pieces' ids, None if they may differ from those of the whole.

    `plain`: the file's tokenizer, loaded. `encode`: the function that will make the ids.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.MsgspecError):
        return None
    steps = list(_steps(file.normalizer))
    added = [token.content for token in file.added_tokens]
    if not all(map(_changes_characters, steps)) or any(map(_reaches_over_a_cut, added)) or not _is_plain(file.model):
        return None
    if not (_ends_words(plain) or _never_merges_over_a_cut(file.model, added)):
        return None
    drop_space = any(step["type"] == "Prepend" for step in steps)
    around = _special_tokens(encode)
    if around is None or not all(_joins(text, encode, drop_space) for text in _probes(added)):
        return None
    return Joint(*around, drop_space)


def whole_cuts(text: str) -> list[int]:
    """Return every place where a text can be cut.

    >>> whole_cuts("one two  three 4 five six")
    [3, 21]
    """
    return [found.start() for found in TEXT_CUT.finditer(text)]


def _steps(normalizer: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if normalizer is None:
        return
    if normalizer.get("type") == "Sequence":
        for step in normalizer.get("normalizers", ()):
            yield from _steps(step)
    else:
        yield normalizer


def _changes_characters(step: dict[str, Any]) -> bool:
    """Return whether a step of the normalizer does the same to a piece as to the whole, but for a first space."""
    match step:
        case {"type": "Replace", "pattern": {"String": pattern}}:
            return len(pattern) == 1
        case {"type": "Prepend", "prepend": prepend}:
            return bool(prepend == _SPACE)
        case {"type": kind}:
            return kind in _CHARACTER_BY_CHARACTER
    return False


def _reaches_over_a_cut(added: str) -> bool:
    if len(added) > 1 and not added.strip(f" {_SPACE}"):
        return False  # several spaces: there is only one at a cut
    return not added or bool({added[0], added[-1]} & _UNSAFE_ENDS or TEXT_CUT.search(added))


def _is_plain(model: _Model) -> bool:
    others = (model.dropout, model.continuing_subword_prefix, model.end_of_word_suffix)
    return model.type == "BPE" and isinstance(model.vocab, dict) and not any(others)


def _ends_words(plain: tokenizers.Tokenizer) -> bool:
    """Return whether the pre-tokenizer ends a word at every cut of the probes."""
    splitter = plain.pre_tokenizer
    if splitter is None:
        return False
    probe = next(_probes([]))
    text = plain.normalizer.normalize_str(probe) if plain.normalizer is not None else probe
    starts = {start for _, (start, _) in splitter.pre_tokenize_str(text)}
    cuts = whole_cuts(text)
    return bool(cuts) and starts.issuperset(cuts)


def _never_merges_over_a_cut(model: _Model, added: list[str]) -> bool:
    merged = set(model.vocab).difference(added)
    unknown_are_apart = not model.fuse_unk or merged.issuperset(f"{ascii_letters}{_SPACE}")
    return not model.ignore_merges and unknown_are_apart and not any(map(_LETTER_THEN_SPACE.search, merged))


def _probes(added: list[str]) -> Iterator[str]:
    """Yield texts with cuts in many surroundings: what people write, and the tokenizer's own added tokens."""
    words = cycle(_WORDS)
    yield "".join(f"{before}{next(words)}{after}" for before, after in product(_AROUND, _AROUND))
    yield "".join(f"{next(words)}{token}{next(words)} {token} {next(words)}" for token in added[:_MOST_PROBED])


def _special_tokens(encode: Encode) -> tuple[PackedTokens, PackedTokens] | None:
    """Return the tokens before and after every prompt, None where they depend on the prompt."""
    found = set()
    for text in _WORDS:
        inside, whole = encode(text, False), encode(text, True)
        at = whole.find(inside)
        if at < 0 or at % TOKEN_BYTES:
            return None
        found.add((PackedTokens(whole[:at]), PackedTokens(whole[at + len(inside) :])))
    return found.pop() if len(found) == 1 else None


def _joins(text: str, encode: Encode, drop_space: bool) -> bool:
    places = [0, *whole_cuts(text), len(text)]
    pieces = [text[start + (drop_space and start > 0) : end] for start, end in pairwise(places)]
    return b"".join(encode(piece, False) for piece in pieces) == encode(text, False)
