"""Resampling: more or fewer requests from a recorded workload, with another popularity."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from preble.errors import ConfigError
from preble.lab.workloads.model import Segment, Workload, WorkloadRequest
from preble.lab.workloads.popularity import Popularity, Zipf
from preble.lab.workloads.trace import made_up_tokens

Session = tuple[WorkloadRequest, ...]
"""A request and those that wait for it, directly or not."""

NONCE_TOKENS = 8


def resample(
    workload: Workload,
    num_requests: int,
    seed: int,
    *,
    popularity: Popularity | None = None,
    num_prefixes: int | None = None,
) -> Workload:
    """Draw `num_requests` requests from `workload`, without arrival times; the same seed draws the same requests.

    Sessions are drawn whole; only the last is cut. `num_prefixes`: keep only this many groups, the most requested.
    `popularity`: recorded (also None) draws from all sessions, so that each group keeps its recorded share; uniform and
    zipf choose the group first, rank 0 being the most requested. No session is drawn twice before all (recorded), or
    all of its group, were drawn once. A session that is drawn again gets some tokens or letters of its own after the
    segments that all its prompts begin with, so that a part unique to one request stays unique.

    Raises: ConfigError: fewer groups than `num_prefixes`, requests without the groups that are needed, or no request.
    """
    if num_requests < 1 or (num_prefixes is not None and num_prefixes < 1):
        raise ConfigError(f"cannot draw {num_requests} requests of {num_prefixes} prefixes; draw at least one of each")
    rng = random.Random(f"resample/{seed}")
    popularity = popularity or Popularity()
    groups = _groups(workload, needed=num_prefixes is not None or popularity.kind != "recorded")
    if num_prefixes is not None and num_prefixes > len(groups):
        raise ConfigError(f"workload {workload.name!r} has {len(groups)} prefixes, not {num_prefixes}; ask for fewer")
    drawn: list[WorkloadRequest] = []
    times_drawn: dict[str, int] = {}
    for session in _draws(groups[:num_prefixes], popularity, rng):
        opener_id = session[0].request_id
        times_drawn[opener_id] = times_drawn.get(opener_id, 0) + 1
        drawn += _copy(session, times_drawn[opener_id])
        if len(drawn) >= num_requests:
            break
    note = f"{workload.note}; {num_requests} requests drawn, popularity {popularity}, seed {seed}"
    return Workload(workload.name, tuple(drawn[:num_requests]), note)


def _groups(workload: Workload, *, needed: bool) -> list[list[Session]]:
    """Return the sessions by group, the most requested first. If not `needed`, sessions without a group form one."""
    groups: dict[str | None, list[Session]] = {}
    for session in workload.sessions():
        groups.setdefault(session[0].group, []).append(session)
    if needed and None in groups:
        raise ConfigError(
            f"request {groups[None][0][0].request_id!r} of workload {workload.name!r} has no group, so popularity "
            "and prefixes have no meaning; leave them out, or give each request a group"
        )
    return sorted(groups.values(), key=lambda sessions: -sum(map(len, sessions)))


def _draws(groups: list[list[Session]], popularity: Popularity, rng: random.Random) -> Iterator[Session]:
    """Yield sessions without end."""
    if popularity.kind == "recorded":
        yield from _shuffled_for_ever([session for sessions in groups for session in sessions], rng)
    decks = [_shuffled_for_ever(sessions, rng) for sessions in groups]
    ranks = Zipf(len(groups), popularity.a)
    while True:
        yield next(decks[ranks.pick(rng)])


def _shuffled_for_ever(sessions: list[Session], rng: random.Random) -> Iterator[Session]:
    while True:
        yield from rng.sample(sessions, len(sessions))


def _copy(session: Session, number: int) -> Iterator[WorkloadRequest]:
    """Return the session without times; later copies get new ids and a piece of prompt of their own."""
    if number == 1:
        yield from (replace(request, arrival_s=None) for request in session)
        return
    nonce = _nonce(session[0], number)
    at = _num_shared_segments(session)
    for request in session:
        yield replace(
            request,
            request_id=f"{request.request_id}~{number}",
            segments=(*request.segments[:at], nonce, *request.segments[at:]),
            arrival_s=None,
            session=request.session and f"{request.session}~{number}",
            parent=request.parent and f"{request.parent}~{number}",
        )


def _num_shared_segments(session: Session) -> int:
    """Return how many leading segments all prompts of the session share, before the first unique one."""
    for place, (first, *others) in enumerate(zip(*(request.segments for request in session), strict=False)):
        if first.segment_id is None or any(other is not first for other in others):
            return place
    return min(len(request.segments) for request in session)


def _nonce(opener: WorkloadRequest, number: int) -> Segment:
    name = f"{opener.request_id}~{number}"
    if opener.segments[0].tokens is None:
        return Segment(name, text=f"[{name}]\n")
    return Segment(name, tokens=made_up_tokens(name, NONCE_TOKENS))
