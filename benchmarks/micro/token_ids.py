"""What the gateway spends to get a request's token ids: reading the body, and tokenizing what it does not remember.

    python benchmarks/micro/token_ids.py --json FILE

The prompts are those of gateway_cost.py: lines of the documentation, in each half of the prompt one of 16 beginnings, a
tokenizer trained on it (fastokens). *New*: prompts that share nothing. *Half known*: new prompts with known beginnings.
*Known*: the same prompts again. CPU time of the process, all its threads, the cheapest of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from pathlib import Path

import msgspec
from gateway_parts.load import Question
from gateway_parts.prompts import Form, Line, Prompts, question, train_tokenizer

from preble.prompts.endpoints.bodies import PromptLimits, read_chat, read_completion
from preble.prompts.tokens.pool import EngineTokens, LocalTokens

CASES: tuple[tuple[Form, int], ...] = (
    *(("text", tokens) for tokens in (1_900, 24_000, 240_000)),
    *(("chat", tokens) for tokens in (1_900, 24_000)),
    *(("ids", tokens) for tokens in (1_900, 24_000)),
)
LIMITS = PromptLimits(1, inf)
REQUESTS = 24
WARM_ROUNDS = 4
"""After these all beginnings are remembered."""


class Row(msgspec.Struct, frozen=True):
    """CPU time in microseconds a request."""

    form: Form
    tokens: int
    body_bytes: int
    new: float
    half_known: float
    known: float


async def take_in(source: LocalTokens, form: Form, body: bytes) -> None:
    """What `Intake` does for the token ids of a request."""
    if form == "chat":
        await source.chat(read_chat(body, LIMITS).chat, None)
    elif not isinstance(prompt := read_completion(body, LIMITS).prompts[0], bytes):
        await source.completion(prompt, True, None)


async def cost_of(questions: Sequence[Question], take: Callable[[bytes], Awaitable[None]]) -> float:
    began = time.process_time()
    for asked in questions:
        await take(asked.body)
    return (time.process_time() - began) * 1e6 / len(questions)


async def measure(form: Form, tokens: int, prompts: Prompts, source: LocalTokens, rounds: int) -> Row:
    def drawn(draw: Callable[[int], list[Line]] = prompts.draw) -> list[Question]:
        count = REQUESTS if tokens < 100_000 else REQUESTS // 4
        return [question(draw(tokens), form=form, events=0, natively=False) for _ in range(count)]

    async def take(body: bytes) -> None:
        await take_in(source, form, body)

    for _ in range(WARM_ROUNDS):
        await cost_of(drawn(), take)
    new = min([await cost_of(drawn(prompts.draw_new), take) for _ in range(rounds)])
    half_known = min([await cost_of(drawn(), take) for _ in range(rounds)])
    same = drawn()
    for _ in range(WARM_ROUNDS):
        await cost_of(same, take)
    known = min([await cost_of(same, take) for _ in range(rounds)])
    return Row(form, tokens, len(same[0].body), new, half_known, known)


async def run(rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        prompts = Prompts(train_tokenizer(folder), 0)
        engines = EngineTokens(lambda model: (), lambda replica_id: None)
        memory = 64 * 2**20
        source = LocalTokens(folder, None, inline_bytes=16 * 1024, workers=2, memory_bytes=memory, engines=engines)
        try:
            return [await measure(form, tokens, prompts, source, rounds) for form, tokens in CASES]
        finally:
            source.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = asyncio.run(run(args.rounds))
    print(f"{'us of CPU a request':24} {'KB':>6} {'new':>7} {'half known':>11} {'known':>7}")
    for row in rows:
        size = f"{row.form:5} {row.tokens:7} tokens {row.body_bytes // 1000:9}"
        print(f"{size} {row.new:7.0f} {row.half_known:11.0f} {row.known:7.0f}")
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")


if __name__ == "__main__":
    main()
