"""An agent in an environment, in a closed loop: each action is a request that repeats all that went before.

The paper's embodied agent (ALFWorld). An episode begins with an id of its own, so that nothing is shared between
episodes, not even the demonstration that follows. Inside an episode each prompt is the one before it, the answer to
that, and what the environment then showed; it is sent as soon as the answer is there.

Table 1, (mean, sd): prompt (2285, 471), output (16, 13), shared (97 %, 14 %), key portion (76 %, 12 %), requests to a
key portion (48, 8). Made so: all within 10 %.
"""

from __future__ import annotations

import random

from preble.errors import ConfigError
from preble.workloads.generators.pieces import draw_uses, made_up_segment
from preble.workloads.generators.session import Turn, session_requests
from preble.workloads.lengths import Lengths
from preble.workloads.model import Workload, WorkloadRequest
from preble.workloads.popularity import Popularity, in_proportion

TASK_TOKENS = Lengths("normal", 1715, 335, low=600, high=3000)
"""The first prompt of an episode: its id, the demonstration, the task."""
STEPS = Lengths("normal", 48, 7.7)
OBSERVATION_TOKENS = Lengths("gamma", 7.5, 5)
OUTPUT_TOKENS = Lengths("gamma", 16, 13)


def agent(
    num_requests: int, seed: int, *, popularity: Popularity | None = None, num_prefixes: int | None = None
) -> Workload:
    """Episodes of requests with parents, without arrival times; the last episode is cut where the requests are enough.

    `num_prefixes`: how many episodes, which are then shorter or longer to make up the requests; None for as many as
    have about 48 steps each.

    Raises: ConfigError: a popularity other than recorded, for episodes have nothing in common.
    """
    if popularity is not None and popularity.kind != "recorded":
        raise ConfigError(
            f"popularity {popularity} means nothing for agent, whose episodes share nothing; leave it out"
        )
    rng = random.Random(f"agent/{seed}")
    steps = in_proportion(num_requests, draw_uses(num_requests, STEPS, num_prefixes, rng))
    requests: list[WorkloadRequest] = []
    for episode, count in enumerate(steps):
        content = f"agent/{seed}:episode:{episode}"
        task = made_up_segment(content, TASK_TOKENS.draw(rng))
        turns = (Turn(OBSERVATION_TOKENS.draw(rng), OUTPUT_TOKENS.draw(rng)) for _ in range(count))
        requests += session_requests(f"agent-{episode}", (task,), turns, content=content, group=f"episode:{episode}")
    return Workload("agent", tuple(requests), f"agent: {len(steps)} episodes, closed loop, seed {seed}; made-up tokens")
