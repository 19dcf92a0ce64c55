"""A small workload with something of everything, and the profile of the replicas that it keeps busy."""

from __future__ import annotations

from random import Random

from preble.core.costs.model import CostProfile
from preble.lab.workloads import Segment, Workload, WorkloadRequest
from preble.lab.workloads.trace import made_up_tokens

PROFILE = CostProfile(
    "golden", "made up", ((0, 0.01), (100, 0.01), (2000, 0.25)), 2e-9, 0.02, 0.0001, 2e-7, 198_516, typical_batch=16
)


def workload() -> Workload:
    """Three tools below one system prompt, a few conversations, and a burst on one document."""
    rng = Random(0)
    system, document = segment("system", 120), segment("document", 900)
    tools = [segment(f"tool {i}", 300 + 40 * i) for i in range(3)]
    requests = [
        WorkloadRequest(
            f"tool-{i}", (system, tools[min(rng.randrange(5), 2)], own(i, 40)), rng.randint(4, 20), arrival_s=0.05 * i
        )
        for i in range(40)
    ]
    requests += [WorkloadRequest(f"burst-{i}", (document, own(100 + i, 60)), 10, arrival_s=1.0) for i in range(24)]
    for i in range(4):
        turns = [segment(f"talk {i} {turn}", 150) for turn in range(3)]
        for turn in range(3):
            requests.append(
                WorkloadRequest(
                    f"talk-{i}-{turn}",
                    tuple(turns[: turn + 1]),
                    12,
                    arrival_s=0.3 * i if turn == 0 else None,
                    session=f"talk-{i}",
                    parent=f"talk-{i}-{turn - 1}" if turn else None,
                    delay_s=0.2,
                )
            )
    return Workload("golden", tuple(requests))


def long_and_short() -> Workload:
    """Chats beside two documents; then bursts on new ones, the first while nobody else asks, the second beside chats,
    the third where earlier ones fill the caches."""
    documents = [segment(f"document {i}", tokens) for i, tokens in enumerate((3000, 3000, 8000, 8000, 8000))]
    asked: list[tuple[float, Segment | None, int]] = [(0.06 * i, None, 50) for i in range(60)]
    asked += [(0.5 + 0.4 * i, documents[i % 2], 40) for i in range(8)]
    asked += [(10.0 + 0.002 * i, documents[2], 30) for i in range(15)]
    asked += [(20.0 + 0.1 * i, None, 50) for i in range(30)]
    asked += [(21.0 + 0.002 * i, documents[3], 30) for i in range(15)]
    asked += [(40.0 + 0.002 * i, documents[4], 30) for i in range(15)]
    return Workload(
        "long and short",
        tuple(
            WorkloadRequest(
                f"ask-{i}", (document, own(i, tokens)) if document else (own(i, tokens),), 40, arrival_s=arrival_s
            )
            for i, (arrival_s, document, tokens) in enumerate(asked)
        ),
    )


def segment(name: str, num_tokens: int) -> Segment:
    return Segment(name, tokens=made_up_tokens(name, num_tokens))


def own(number: int, num_tokens: int) -> Segment:
    return Segment(tokens=made_up_tokens(f"own {number}", num_tokens))
