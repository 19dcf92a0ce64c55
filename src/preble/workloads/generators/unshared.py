"""Prompts of which no two share anything: what a cache-aware policy must do no harm to.

Lengths, (mean, sd): prompt (1155, 1100), output (211, 160). The means are those of the Azure 2023 conversation trace,
whose requests do not say what they share; its outputs reach 1,000 tokens, its prompts 4,000 but for a few.
"""

from __future__ import annotations

import random

from preble.workloads.lengths import Lengths
from preble.workloads.model import Segment, Workload, WorkloadRequest
from preble.workloads.popularity import Popularity
from preble.workloads.trace import own_tokens

PROMPT_TOKENS = Lengths("lognormal", 1155, 1100, low=8, high=7000)
OUTPUT_TOKENS = Lengths("gamma", 211, 160, low=1, high=1000)


def unshared(
    num_requests: int, seed: int, *, popularity: Popularity | None = None, num_prefixes: int | None = None
) -> Workload:
    """The workload, without arrival times. The same arguments give the same workload.

    `popularity`, `num_prefixes`: ignored, for there is nothing to share.
    """
    del popularity, num_prefixes
    rng = random.Random(f"unshared/{seed}")
    requests = tuple(_request(f"unshared/{seed}-{i}", rng) for i in range(num_requests))
    return Workload("unshared", requests, f"unshared: no two prompts share anything, seed {seed}; made-up tokens")


def _request(request_id: str, rng: random.Random) -> WorkloadRequest:
    prompt = Segment(tokens=own_tokens(request_id, PROMPT_TOKENS.draw(rng)))
    return WorkloadRequest(request_id, (prompt,), OUTPUT_TOKENS.draw(rng))
