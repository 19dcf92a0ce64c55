"""Mooncake's traces: arrival times, lengths, and hashes of the prompt's blocks of 512 tokens.

A hash stands for a block and all before it, so prompts with equal leading hashes share that prefix. Token j of the
block with hash h is a function of h and j alone; the last block is cut to the prompt's length.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
from msgspec import Meta

from preble.lab.workloads.lines import bad_line, decoded_lines
from preble.lab.workloads.loaders.assemble import MadeUpSegments, assembled, workload_name
from preble.lab.workloads.loaders.options import LoadOptions
from preble.lab.workloads.model import Segment, Workload, WorkloadRequest
from preble.lab.workloads.trace import MAX_TOKENS, AnswerTokens, NumTokens

BLOCK_TOKENS = 512
"""Of Mooncake's own traces. Others have other blocks: the size is taken that fits every line."""
EXAMPLE = '{"timestamp": 3000, "input_length": 700, "output_length": 50, "hash_ids": [0, 7]}'


class _MooncakeLine(msgspec.Struct, frozen=True):
    """`timestamp`: milliseconds."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: NumTokens
    output_length: AnswerTokens
    hash_ids: list[int]


def read_mooncake(path: Path, options: LoadOptions) -> Workload:
    """Raises: TraceFormatError."""
    lines, block_tokens = _numbered_requests(path)
    note = f"blocks of {block_tokens} tokens, made up from their hashes"
    workload = assembled(path, _requests(path, lines, block_tokens), note)
    if not options.spread_ticks:
        return workload
    times_s = spread_ticks([request.arrival_s or 0.0 for request in workload.requests])
    return replace(workload.with_arrivals(times_s), note=f"{workload.note}; each tick's requests spread over the tick")


def spread_ticks(times_s: Sequence[float]) -> list[float]:
    """Return ascending times, the k of one tick moved to equal steps of 1/k from it to the next; the first stays.

    A tick lasts until the next one, and no longer than the median gap between ticks, so that a pause stays a pause.
    Times that are all different stay as they are.

    >>> spread_ticks([0.0, 0.0, 3.0, 3.0, 3.0, 6.0, 60.0, 60.0])
    [0.0, 1.5, 3.0, 4.0, 5.0, 6.0, 60.0, 61.5]
    """
    counts = Counter(times_s)
    ticks = sorted(counts)
    usual_s = median([b - a for a, b in pairwise(ticks)]) if len(ticks) > 1 else 0.0
    spread: list[float] = []
    for tick, following in zip(ticks, [*ticks[1:], math.inf], strict=True):
        length_s = min(usual_s, following - tick)
        spread += [tick + length_s * i / counts[tick] for i in range(counts[tick])]
    return spread


class _BlockSizes:
    """The sizes of a block that fit every line so far: n hashes are of a prompt of n - 1 whole blocks and a part."""

    def __init__(self) -> None:
        self._low, self._high = 1, MAX_TOKENS

    def narrow(self, line: _MooncakeLine) -> str | None:
        """Take a line into account. What is wrong with it, if no size fits it and all lines before it."""
        num = len(line.hash_ids)
        low, high = -(-line.input_length // num) if num else MAX_TOKENS + 1, MAX_TOKENS
        if num > 1:
            high = (line.input_length - 1) // (num - 1)
        fits = max(low, self._low) <= min(high, self._high)
        if fits:
            self._low, self._high = max(low, self._low), min(high, self._high)
            return None
        sizes = f"{self._low} to {self._high} tokens" if self._high < MAX_TOKENS else f"{self._low} tokens or more"
        return (
            f"{num} hash_ids for {line.input_length} tokens; there must be one for each block, and in the lines before "
            f"a block has {sizes}"
        )

    def chosen(self) -> int:
        """Mooncake's own if it fits; else the largest power of two that does, or the largest of all."""
        if self._low <= BLOCK_TOKENS <= self._high:
            return BLOCK_TOKENS
        if self._high == MAX_TOKENS:
            return self._low
        power = 1 << (self._high.bit_length() - 1)
        return power if power >= self._low else self._high


def _numbered_requests(path: Path) -> tuple[list[tuple[int, _MooncakeLine]], int]:
    """Return the lines with their numbers, and how many tokens a block has."""
    sizes, lines = _BlockSizes(), []
    for number, line in decoded_lines(path, _MooncakeLine, EXAMPLE):
        if wrong := sizes.narrow(line):
            raise bad_line(path, number, wrong)
        lines.append((number, line))
    return lines, sizes.chosen()


def _requests(path: Path, lines: Sequence[tuple[int, _MooncakeLine]], block_tokens: int) -> Iterator[WorkloadRequest]:
    name, blocks = workload_name(path), MadeUpSegments()
    for number, line in lines:
        yield WorkloadRequest(
            f"{name}-{number}",
            tuple(_prompt(name, line, blocks, block_tokens)),
            max(1, line.output_length),
            arrival_s=line.timestamp / 1000,
        )


def _prompt(name: str, line: _MooncakeLine, blocks: MadeUpSegments, block_tokens: int) -> Iterator[Segment]:
    for place, block_hash in enumerate(line.hash_ids):
        num_tokens = min(block_tokens, line.input_length - place * block_tokens)
        yield blocks.beginning(f"{name}:{block_hash}", num_tokens, block_tokens)
