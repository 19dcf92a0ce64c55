"""Sessions of coding agents: many turns on a growing context, pauses while tools run, and sub-agents of their own.

What is published of such traffic are medians: 43 turns in a session, 44 % of the sessions with sub-agents (AgentX, in
vllm-project/vllm#57103), prompts of 34,000 to 142,000 tokens and answers of 344 to 445 (AgentX, a GLM-5.1 trace, a
benchmark of Dynamo). Turns, sub-agents and answers are made after these; the median prompt has some 36,000 tokens.
Nobody has published what tools return and how long they take: those are guesses.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from preble.lab.workloads.generators.pieces import Asked, made_up_segment
from preble.lab.workloads.generators.session import Turn, session_requests
from preble.lab.workloads.lengths import Lengths
from preble.lab.workloads.model import Workload, WorkloadRequest

SYSTEM_TOKENS, SUB_AGENT_TOKENS = 14_000, 6_000
"""Instructions and tools, of an assistant and of each kind of its sub-agents."""
KINDS = 3
"""Of sub-agents that an assistant has."""
TURNS = Lengths("lognormal", 51.5, 33.9, low=2, high=150)
SUB_AGENT_TURNS = Lengths("lognormal", 10, 6, low=1, high=40)
WITH_SUB_AGENTS = 0.44
"""Of the sessions; each of those calls some of them once."""
MOST_AT_ONCE = 3
TASK_TOKENS = Lengths("lognormal", 600, 800, low=20, high=8000)
RESULT_TOKENS = Lengths("lognormal", 550, 1200, low=10, high=12_000)
OUTPUT_TOKENS = Lengths("lognormal", 474, 450, low=8, high=4000)
TOOL_S = Lengths("lognormal", 6, 20, low=0, high=300)
PERSON_S = Lengths("lognormal", 90, 120, low=5, high=900)
"""Seconds until a tool has its result, and until a person has read an answer."""
BY_PERSON = 0.08
"""Of the turns; the others follow a tool's result."""


def coding(asked: Asked) -> Workload:
    """Return sessions in closed loops of coding agents, each with its assistant's instructions; the last one ends at
    `num_requests`. A session that calls sub-agents goes on when the one with the most turns has ended.
    """
    seed, assistants = asked.seed, asked.assistants
    rng = random.Random(f"coding/{seed}")
    requests: list[WorkloadRequest] = []
    while len(requests) < asked.num_requests:
        session = list(_session(f"coding/{seed}:{len(requests)}", f"coding-{len(requests)}", assistants.pick(rng), rng))
        requests += session[: asked.num_requests - len(requests)]
    note = f"coding: {asked.num_prefixes or 1} assistant(s), closed loop, seed {seed}; made-up tokens"
    return Workload("coding", tuple(requests), note)


def _session(content: str, name: str, assistant: int, rng: random.Random) -> Iterator[WorkloadRequest]:
    """Yield a session's requests, each after the one that it waits for."""
    group = f"assistant:{assistant}"
    system = made_up_segment(f"coding:system:{assistant}", SYSTEM_TOKENS)
    turns = [_turn(is_first=turn == 0, rng=rng) for turn in range(TURNS.draw(rng))]
    agent = session_requests(name, (system,), turns, content=content, group=group)
    if rng.random() >= WITH_SUB_AGENTS:
        yield from agent
        return
    called_at = rng.randrange(1, len(agent))
    yield from agent[:called_at]
    longest: list[WorkloadRequest] = []
    for number in range(rng.randint(1, MOST_AT_ONCE)):
        sub_agent = _sub_agent(agent[called_at - 1], f"{name}.{number}", assistant, rng)
        yield from sub_agent
        longest = max(longest, sub_agent, key=len)
    yield replace(agent[called_at], parent=longest[-1].request_id, delay_s=0.0)
    yield from agent[called_at + 1 :]


def _sub_agent(caller: WorkloadRequest, name: str, assistant: int, rng: random.Random) -> list[WorkloadRequest]:
    """Return the requests of a sub-agent, which begins when its caller is answered."""
    kind = made_up_segment(f"coding:sub-agent:{assistant}.{rng.randrange(KINDS)}", SUB_AGENT_TOKENS)
    turns = [_turn(is_first=turn == 0, rng=rng) for turn in range(SUB_AGENT_TURNS.draw(rng))]
    made = session_requests(name, (kind,), turns, content=f"{caller.request_id}:{name}", group=caller.group or "")
    first, *later = (replace(request, session=caller.session) for request in made)
    return [replace(first, parent=caller.request_id), *later]


def _turn(*, is_first: bool, rng: random.Random) -> Turn:
    by_person = rng.random() < BY_PERSON
    added = TASK_TOKENS if is_first or by_person else RESULT_TOKENS
    return Turn(added.draw(rng), OUTPUT_TOKENS.draw(rng), float((PERSON_S if by_person else TOOL_S).draw(rng)))
