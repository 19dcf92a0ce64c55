"""Workloads that the paper does not have: conversations with an assistant, and prompts that share nothing."""

from __future__ import annotations

import random

from preble.lab.workloads.generators.pieces import Asked, draw_uses, made_up_segment
from preble.lab.workloads.generators.session import Turn, session_requests
from preble.lab.workloads.lengths import Lengths
from preble.lab.workloads.model import Segment, Workload, WorkloadRequest
from preble.lab.workloads.trace import own_tokens

# The numbers of `multiturn` are those of 69 conversations of tau-bench's retail assistant (943 calls): a policy of
# 1,316 tokens that all share, 13.7 calls in a conversation, prompts of 2,780 tokens (sd 1,535), answers of 39 (sd 52).
SYSTEM_TOKENS = 1316
TURNS = Lengths("normal", 13.7, 3.8)
FIRST_MESSAGE_TOKENS = Lengths("normal", 28, 10, low=8)
MESSAGE_TOKENS = Lengths("gamma", 175, 290, low=7)
"""What arrives between two answers: a user's message, or a tool's result."""
OUTPUT_TOKENS = Lengths("gamma", 39, 52)
THINK_S = (0.25, 3.0)
"""Seconds from an answer to the next turn, uniform in this range (AIBrix's agent sessions; tau-bench has no times)."""

# The means of `unshared` are those of the Azure 2023 conversation trace, which does not record what its requests share.
# In that trace outputs reach 1,000 tokens, and few prompts exceed 4,000.
UNSHARED_PROMPT_TOKENS = Lengths("lognormal", 1155, 1100, low=8, high=7000)
UNSHARED_OUTPUT_TOKENS = Lengths("gamma", 211, 160, low=1, high=1000)


def multiturn(asked: Asked) -> Workload:
    """Return conversations in closed loops with assistants, each of which has a long system prompt.

    The last conversation ends at `num_requests`. The recording has one assistant, so "recorded" means uniform.
    """
    rng, assistants = random.Random(f"multiturn/{asked.seed}"), asked.assistants
    requests: list[WorkloadRequest] = []
    for number, num_turns in enumerate(draw_uses(asked.num_requests, TURNS, None, rng)):
        assistant = assistants.pick(rng)
        system = made_up_segment(f"multiturn:system:{assistant}", SYSTEM_TOKENS)
        requests += session_requests(
            f"multiturn-{number}",
            (system,),
            (_turn(is_first=turn == 0, rng=rng) for turn in range(num_turns)),
            content=f"multiturn/{asked.seed}:conversation:{number}",
            group=f"assistant:{assistant}",
        )
    note = f"multiturn: conversations with {asked.num_prefixes or 1} assistant(s), closed loop, seed {asked.seed}"
    return Workload("multiturn", tuple(requests), f"{note}; made-up tokens")


def _turn(*, is_first: bool, rng: random.Random) -> Turn:
    message = FIRST_MESSAGE_TOKENS if is_first else MESSAGE_TOKENS
    return Turn(message.draw(rng), OUTPUT_TOKENS.draw(rng), rng.uniform(*THINK_S))


def unshared(asked: Asked) -> Workload:
    """Return prompts that share nothing: a cache-aware policy must not slow these down."""
    rng = random.Random(f"unshared/{asked.seed}")
    requests: list[WorkloadRequest] = []
    for number in range(asked.num_requests):
        request_id = f"unshared/{asked.seed}-{number}"
        prompt = Segment(tokens=own_tokens(request_id, UNSHARED_PROMPT_TOKENS.draw(rng)))
        requests.append(WorkloadRequest(request_id, (prompt,), UNSHARED_OUTPUT_TOKENS.draw(rng)))
    note = f"unshared: no two prompts share anything, seed {asked.seed}; made-up tokens"
    return Workload("unshared", tuple(requests), note)
