"""Requests that follow one another: each prompt is the previous one, its answer, and something new."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from preble.errors import ConfigError
from preble.lab.workloads.generators.pieces import Asked, draw_uses, made_up_segment
from preble.lab.workloads.lengths import Lengths
from preble.lab.workloads.model import Segment, Workload, WorkloadRequest
from preble.lab.workloads.popularity import in_proportion


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request adds to the conversation, and how many tokens its answer has; `delay_s` before it is sent."""

    input_tokens: int
    output_tokens: int
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Episodes:
    """A workload of episodes in closed loops; call it to make it. Episodes share nothing with each other.

    The client sends each prompt as soon as the previous answer is complete. `task_tokens`: the first prompt of an
    episode. `steps`: requests per episode. `observation_tokens`: what the environment shows after an answer.
    """

    name: str
    task_tokens: Lengths
    steps: Lengths
    observation_tokens: Lengths
    output_tokens: Lengths

    def __call__(self, asked: Asked) -> Workload:
        """Return requests with parents; the last episode ends at `num_requests`.

        `num_prefixes`: the number of episodes, which get shorter or longer to add up to the requests.

        Raises: ConfigError: a popularity other than recorded, because no two episodes share a prefix.
        """
        seed, num_requests, popularity = asked.seed, asked.num_requests, asked.popularity
        if popularity is not None and popularity.kind != "recorded":
            raise ConfigError(
                f"popularity {popularity} has no meaning for {self.name}: its episodes share nothing; leave it out"
            )
        rng = random.Random(f"{self.name}/{seed}")
        steps = in_proportion(num_requests, draw_uses(num_requests, self.steps, asked.num_prefixes, rng))
        requests: list[WorkloadRequest] = []
        for episode, count in enumerate(steps):
            content = f"{self.name}/{seed}:episode:{episode}"
            task = made_up_segment(content, self.task_tokens.draw(rng))
            turns = (Turn(self.observation_tokens.draw(rng), self.output_tokens.draw(rng)) for _ in range(count))
            requests += session_requests(
                f"{self.name}-{episode}", (task,), turns, content=content, group=f"episode:{episode}"
            )
        note = f"{self.name}: {len(steps)} episodes, closed loop, seed {seed}; made-up tokens"
        return Workload(self.name, tuple(requests), note)


def session_requests(
    name: str, opening: tuple[Segment, ...], turns: Iterable[Turn], *, content: str, group: str
) -> list[WorkloadRequest]:
    """Return the requests of a closed loop: one for each turn, whose parent is the previous one.

    The prompt of a turn is `opening`, then the input of each earlier turn and an answer of exactly its `output_tokens`,
    then its own input. `name` begins the ids of requests, `content` those of segments.
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
