"""Sessions: requests that follow one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from preble.lab.workloads.model import WorkloadRequest
from preble.lab.workloads.study.distribution import Distribution, distribution


class SessionStudy(msgspec.Struct, frozen=True):
    """The sessions of a workload.

    `requests`: of a session, over the sessions. `waiting`: the number of requests that wait for their parent's answer.
    `growth_tokens`: how much longer their prompts are than the parent's. `delay_s`: how long after its end they are
    sent. Both None if no request waits.
    """

    sessions: int
    requests: Distribution
    waiting: int
    growth_tokens: Distribution | None
    delay_s: Distribution | None


def study_sessions(requests: Sequence[WorkloadRequest], prompt_tokens: Sequence[int]) -> SessionStudy | None:
    """Return the sessions of requests and their prompt lengths; None if there are no sessions. O(requests)."""
    sizes = Counter(request.session for request in requests if request.session is not None)
    if not sizes:
        return None
    lengths = {request.request_id: length for request, length in zip(requests, prompt_tokens, strict=True)}
    waiting = [(request, request.parent) for request in requests if request.parent is not None]
    growth = [lengths[request.request_id] - lengths[parent] for request, parent in waiting]
    return SessionStudy(
        sessions=len(sizes),
        requests=distribution(list(sizes.values())),
        waiting=len(waiting),
        growth_tokens=distribution(growth) if waiting else None,
        delay_s=distribution([request.delay_s for request, _ in waiting]) if waiting else None,
    )
