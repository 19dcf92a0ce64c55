"""A workload in memory: requests whose prompts are made of shared segments."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from preble.core.types import TOKEN_BYTES, PackedTokens, unpack_tokens
from preble.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of prompt: text or token ids (exactly one is set). Prompts share it by reference.

    `segment_id`: None if only one prompt has it.
    """

    segment_id: str | None = None
    text: str | None = None
    tokens: PackedTokens | None = None

    @property
    def num_tokens(self) -> int | None:
        """Return the number of tokens; None for text, whose tokens depend on the model."""
        return None if self.tokens is None else len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request to send.

    `segments`: the prompt in order, all text or all token ids. `output_tokens`: how many to ask for. `arrival_s`: when
    to send it, from the start of the run; None until arrivals are assigned. `parent`: the earlier request of the same
    `session`; this one is sent at least `delay_s` after its answer. `group`: a label for reports, such as the tool
    that the request is about.
    """

    request_id: str
    segments: tuple[Segment, ...]
    output_tokens: int
    arrival_s: float | None = None
    session: str | None = None
    parent: str | None = None
    delay_s: float = 0.0
    group: str | None = None

    def prompt(self) -> str | list[int]:
        """Return the whole prompt, as text or as token ids. O(its length).

        >>> WorkloadRequest("r", (Segment(text="Be brief. "), Segment(text="Why?")), 8).prompt()
        'Be brief. Why?'
        """
        if self.segments[0].tokens is None:
            return "".join(segment.text or "" for segment in self.segments)
        return list(chain.from_iterable(unpack_tokens(segment.tokens or b"") for segment in self.segments))


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in sending order. `note`: their origin, for results."""

    name: str
    requests: tuple[WorkloadRequest, ...]
    note: str = ""

    @property
    def openers(self) -> tuple[WorkloadRequest, ...]:
        """Return the requests that wait for no other: they need an arrival time."""
        return tuple(request for request in self.requests if request.parent is None)

    def children(self) -> dict[str, list[WorkloadRequest]]:
        """Return the requests that wait for another one, by its id, in order. O(requests)."""
        children: dict[str, list[WorkloadRequest]] = {}
        for request in self.requests:
            if request.parent is not None:
                children.setdefault(request.parent, []).append(request)
        return children

    def sessions(self) -> list[tuple[WorkloadRequest, ...]]:
        """Return each opener with all requests that wait for it, directly or not, in order. O(requests)."""
        opener_of: dict[str, str] = {}
        sessions: dict[str, list[WorkloadRequest]] = {}
        for request in self.requests:
            opener = request.request_id if request.parent is None else opener_of[request.parent]
            opener_of[request.request_id] = opener
            sessions.setdefault(opener, []).append(request)
        return [tuple(session) for session in sessions.values()]

    @property
    def has_arrivals(self) -> bool:
        return all(request.arrival_s is not None for request in self.openers)

    def stretch(self, num_requests: int, rng: random.Random) -> Workload:
        """Return the same workload cut to `num_requests` that follow each other, from a session that `rng` picks.

        No parent is lost: of sessions that began before, nothing is left. Times count from the first request that is.

        Raises: ConfigError: there are fewer.
        """
        if num_requests > len(self.requests):
            raise ConfigError(
                f"workload {self.name!r} has {len(self.requests)} requests, fewer than {num_requests}; "
                "draw some of them again with popularity recorded, or ask for fewer"
            )
        sessions = self.sessions()
        left, num_starts = 0, 0
        for place in range(len(sessions) - 1, -1, -1):
            left += len(sessions[place])
            if left >= num_requests:
                num_starts = place + 1
                break
        begun = {request.request_id for session in sessions[rng.randrange(num_starts) :] for request in session}
        kept = [request for request in self.requests if request.request_id in begun][:num_requests]
        first_s = kept[0].arrival_s or 0.0
        times = (r if r.arrival_s is None else replace(r, arrival_s=max(r.arrival_s - first_s, 0.0)) for r in kept)
        return replace(self, requests=tuple(times))

    def with_arrivals(self, times_s: Sequence[float]) -> Workload:
        """Return the workload with these arrival times for its openers, in order.

        Raises: ValueError: the number of times is not that of openers.
        """
        times = iter(times_s)
        if len(times_s) != len(self.openers):
            raise ValueError(f"{len(self.openers)} requests need an arrival time, got {len(times_s)}")
        arriving = (r if r.parent is not None else replace(r, arrival_s=next(times)) for r in self.requests)
        return replace(self, requests=tuple(arriving))
