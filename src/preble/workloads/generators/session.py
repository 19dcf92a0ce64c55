"""Requests that follow one another: each prompt is the one before it, the answer to that, and something new."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from preble.workloads.generators.pieces import made_up_segment
from preble.workloads.model import Segment, WorkloadRequest


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request adds to the conversation, and how many tokens its answer has; `delay_s` before it is sent."""

    input_tokens: int
    output_tokens: int
    delay_s: float = 0.0


def session_requests(
    name: str, opening: tuple[Segment, ...], turns: Iterable[Turn], *, content: str, group: str
) -> list[WorkloadRequest]:
    """A closed loop: a request for each turn, its parent the one before it.

    The prompt of a turn: `opening`, then for every turn before it its input and an answer of exactly its
    `output_tokens`, then its own input. `name`: begins the ids of requests. `content`: begins the ids of segments.
    """
    requests: list[WorkloadRequest] = []
    prompt = opening
    for step, turn in enumerate(turns):
        prompt = (*prompt, made_up_segment(f"{content}:input:{step}", turn.input_tokens))
        requests.append(
            WorkloadRequest(
                f"{name}-{step}",
                prompt,
                turn.output_tokens,
                session=name,
                parent=requests[-1].request_id if requests else None,
                delay_s=turn.delay_s if requests else 0.0,
                group=group,
            )
        )
        prompt = (*prompt, made_up_segment(f"{content}:answer:{step}", turn.output_tokens))
    return requests
