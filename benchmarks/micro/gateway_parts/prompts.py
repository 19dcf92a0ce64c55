"""Prompts of the benchmark of the gateway: lines of this documentation, with a tokenizer that is trained on it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway_parts.load import Question
from gateway_parts.upstream import MODEL

DOCS = Path(__file__).parents[3] / "docs"
VOCABULARY = 8000
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up the {name} of a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
    for name in ("weather", "population", "history", "currency")
]
Form = Literal["text", "ids", "chat"]
PREFIXES = 16
"""The number of prefixes in use, of each length."""
SHARED = 0.9
"""The part of a prompt that is one of the prefixes: 85 to 97 % in the five workloads of the paper."""


def train_tokenizer(folder: Path) -> Tokenizer:
    """A byte-level BPE tokenizer of the documentation, saved in `folder` for the gateway."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        documentation_lines(),
        trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode({"chat_template": TEMPLATE}))
    return tokenizer


def documentation_lines() -> list[str]:
    """Every line of the documentation that is not empty."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))]
    return [line + "\n" for page in pages for line in page.splitlines() if line]


@dataclass(frozen=True, slots=True)
class Line:
    text: str
    ids: tuple[int, ...]


class Prompts:
    """Prompts without end, each new: one of the prefixes, and a rest of its own."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._rng = random.Random(seed)
        lines = documentation_lines()
        encodings = tokenizer.encode_batch(lines, add_special_tokens=False)
        self._lines = [Line(text, tuple(found.ids)) for text, found in zip(lines, encodings, strict=True)]
        self._prefixes: dict[int, list[list[Line]]] = {}

    def draw(self, num_tokens: int, shared: float = SHARED) -> list[Line]:
        """A prompt of `num_tokens` or, so that its last line is whole, a few more. `shared`: the part of it that is one
        of the prefixes."""
        length = int(num_tokens * shared)
        if length not in self._prefixes:
            self._prefixes[length] = [self.draw_new(length) for _ in range(PREFIXES)]
        prefix = self._rng.choice(self._prefixes[length])
        return prefix + self.draw_new(num_tokens - sum(len(line.ids) for line in prefix))

    def draw_new(self, num_tokens: int) -> list[Line]:
        """A prompt of this length that begins like no other."""
        lines: list[Line] = []
        while num_tokens > 0:
            lines.append(self._rng.choice(self._lines))
            num_tokens -= len(lines[-1].ids)
        return lines


def question(prompt: Sequence[Line], *, form: Form, events: int, natively: bool) -> Question:
    """Asks for a completion, or a chat. `events`: 0 for an answer that comes whole. `natively`: in SGLang's form."""
    ids = [token for line in prompt for token in line.ids]
    text = "".join(line.text for line in prompt)
    fields: dict[str, object] = {"stream": events > 0}
    path = "/v1/completions"
    if natively:
        path = "/generate"
        fields |= {"input_ids": ids} if form == "ids" else {"text": text}
        fields["sampling_params"] = {"max_new_tokens": max(1, events)}
    elif form == "chat":
        path = "/v1/chat/completions"
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        fields |= {"model": MODEL, "messages": messages, "tools": TOOLS, "max_tokens": max(1, events)}
    else:
        fields |= {"model": MODEL, "prompt": ids if form == "ids" else text, "max_tokens": max(1, events)}
    return Question(path, msgspec.json.encode(fields), events > 0)
