"""Conversations with an assistant that has a long system prompt and calls tools, in a closed loop.

Not one of the paper's five workloads. Its numbers are those of 69 conversations of tau-bench's retail assistant (943
calls): a policy of 1,316 tokens that all share, 13.7 calls to a conversation, prompts of 2,780 tokens (sd 1,535),
answers of 39 (sd 52).
"""

from __future__ import annotations

import random

from preble.workloads.generators.pieces import draw_uses, made_up_segment
from preble.workloads.generators.session import Turn, session_requests
from preble.workloads.lengths import Lengths
from preble.workloads.model import Workload, WorkloadRequest
from preble.workloads.popularity import Popularity, Zipf

SYSTEM_TOKENS = 1316
TURNS = Lengths("normal", 13.7, 3.8)
FIRST_MESSAGE_TOKENS = Lengths("normal", 28, 10, low=8)
MESSAGE_TOKENS = Lengths("gamma", 175, 290, low=7)
"""What comes in between two answers: a user's message, or what a tool returned."""
OUTPUT_TOKENS = Lengths("gamma", 39, 52)
THINK_S = (0.25, 3.0)
"""Seconds from an answer to the next turn, uniform between: AIBrix's agent sessions. tau-bench has no times."""


def multiturn(
    num_requests: int, seed: int, *, popularity: Popularity | None = None, num_prefixes: int | None = None
) -> Workload:
    """Conversations of requests with parents, without arrival times; the last is cut where the requests are enough.

    `num_prefixes`: how many assistants there are, each with its own system prompt; None for one. `popularity` of the
    assistants: the recording has only one, so recorded is uniform.
    """
    rng = random.Random(f"multiturn/{seed}")
    assistants = Zipf(1 if num_prefixes is None else num_prefixes, popularity.a if popularity else 0.0)
    requests: list[WorkloadRequest] = []
    for number, num_turns in enumerate(draw_uses(num_requests, TURNS, None, rng)):
        assistant = assistants.pick(rng)
        system = made_up_segment(f"multiturn:system:{assistant}", SYSTEM_TOKENS)
        requests += session_requests(
            f"multiturn-{number}",
            (system,),
            (_turn(is_first=turn == 0, rng=rng) for turn in range(num_turns)),
            content=f"multiturn/{seed}:conversation:{number}",
            group=f"assistant:{assistant}",
        )
    note = f"multiturn: conversations with {num_prefixes or 1} assistant(s), closed loop, seed {seed}; made-up tokens"
    return Workload("multiturn", tuple(requests), note)


def _turn(*, is_first: bool, rng: random.Random) -> Turn:
    message = FIRST_MESSAGE_TOKENS if is_first else MESSAGE_TOKENS
    return Turn(message.draw(rng), OUTPUT_TOKENS.draw(rng), rng.uniform(*THINK_S))
