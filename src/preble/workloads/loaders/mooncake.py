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

from preble.workloads.lines import bad_line, decoded_lines
from preble.workloads.loaders.assemble import MadeUpSegments, assembled, workload_name
from preble.workloads.loaders.options import LoadOptions
from preble.workloads.model import Segment, Workload, WorkloadRequest
from preble.workloads.trace import AnswerTokens, NumTokens

BLOCK_TOKENS = 512
EXAMPLE = '{"timestamp": 3000, "input_length": 700, "output_length": 50, "hash_ids": [0, 7]}'


class _Line(msgspec.Struct, frozen=True):
    """`timestamp`: milliseconds."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: NumTokens
    output_length: AnswerTokens
    hash_ids: list[int]


def read_mooncake(path: Path, options: LoadOptions) -> Workload:
    """Raises: TraceFormatError."""
    workload = assembled(path, _requests(path), f"blocks of {BLOCK_TOKENS} tokens, made up from their hashes")
    if not options.spread_ticks:
        return workload
    times_s = spread_ticks([request.arrival_s or 0.0 for request in workload.requests])
    return replace(workload.with_arrivals(times_s), note=f"{workload.note}; each tick's requests spread over the tick")


def spread_ticks(times_s: Sequence[float]) -> list[float]:
    """Ascending times, the k of one tick moved to equal steps of 1/k from it to the next; the first stays.

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


def _requests(path: Path) -> Iterator[WorkloadRequest]:
    name, blocks = workload_name(path), MadeUpSegments()
    for number, line in decoded_lines(path, _Line, EXAMPLE):
        num_blocks = -(-line.input_length // BLOCK_TOKENS)
        if len(line.hash_ids) != num_blocks:
            raise bad_line(
                path,
                number,
                f"{len(line.hash_ids)} hash_ids for {line.input_length} tokens; there must be one for each block of "
                f"{BLOCK_TOKENS} tokens, so {num_blocks}",
            )
        yield WorkloadRequest(
            f"{name}-{number}",
            tuple(_prompt(name, line, blocks)),
            max(1, line.output_length),
            arrival_s=line.timestamp / 1000,
        )


def _prompt(name: str, line: _Line, blocks: MadeUpSegments) -> Iterator[Segment]:
    for place, block_hash in enumerate(line.hash_ids):
        num_tokens = min(BLOCK_TOKENS, line.input_length - place * BLOCK_TOKENS)
        yield blocks.beginning(f"{name}:{block_hash}", num_tokens, BLOCK_TOKENS)
