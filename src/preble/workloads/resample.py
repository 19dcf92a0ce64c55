"""Other requests from a recorded workload: more or fewer, with other popularity, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile

from preble.errors import ConfigError
from preble.workloads.model import Segment, Workload, WorkloadRequest
from preble.workloads.popularity import Popularity, Zipf
from preble.workloads.trace import made_up_tokens

Session = tuple[WorkloadRequest, ...]
"""A request, and those that wait for it, directly or not."""

NONCE_TOKENS = 8


def resample(
    workload: Workload,
    num_requests: int,
    seed: int,
    *,
    popularity: Popularity | None = None,
    num_prefixes: int | None = None,
) -> Workload:
    """`num_requests` requests drawn from `workload`, without arrival times.

    Sessions are drawn whole; only the last is cut. `num_prefixes`: keep only so many groups, the most requested.
    `popularity`: recorded (also for None) draws from all alike, so that each group is asked for as often as recorded;
    uniform and zipf choose the group first, rank 0 being the most requested. None is drawn a second time before all
    (recorded), or all of its group, were drawn. A session drawn again gets a few tokens, or a few letters, of its own
    after the segments that all its prompts begin with, so that what was asked once is still unique.

    Raises: ConfigError: fewer groups than `num_prefixes`, no groups where they are needed, or nothing to draw.
    """
    if num_requests < 1 or (num_prefixes is not None and num_prefixes < 1):
        raise ConfigError(f"at least one request and one prefix must be drawn, got {num_requests} and {num_prefixes}")
    rng = random.Random(f"resample/{seed}")
    popularity = popularity or Popularity()
    groups = _groups(workload, needed=num_prefixes is not None or popularity.kind != "recorded")
    if num_prefixes is not None and num_prefixes > len(groups):
        raise ConfigError(f"{num_prefixes} prefixes were asked for, but workload {workload.name!r} has {len(groups)}")
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
    """The sessions by group, the most requested first. Where groups are not `needed`, those without one are one."""
    groups: dict[str | None, list[Session]] = {}
    for session in workload.sessions():
        groups.setdefault(session[0].group, []).append(session)
    if needed and None in groups:
        raise ConfigError(
            f"request {groups[None][0][0].request_id!r} of workload {workload.name!r} has no group, so that popularity "
            "and prefixes mean nothing there; leave them out, or give each request a group"
        )
    return sorted(groups.values(), key=lambda sessions: -sum(map(len, sessions)))


def _draws(groups: list[list[Session]], popularity: Popularity, rng: random.Random) -> Iterator[Session]:
    """Sessions without end."""
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
    """The session without times; from the second copy on with ids and a piece of prompt of its own."""
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
    """How many leading segments all prompts of the session have, up to the first that only one prompt has."""
    columns = zip(*(request.segments for request in session), strict=False)
    return sum(1 for _ in takewhile(_is_shared, columns))


def _is_shared(column: tuple[Segment, ...]) -> bool:
    return column[0].segment_id is not None and all(segment is column[0] for segment in column)


def _nonce(opener: WorkloadRequest, number: int) -> Segment:
    name = f"{opener.request_id}~{number}"
    if opener.segments[0].tokens is None:
        return Segment(name, text=f"[{name}]\n")
    return Segment(name, tokens=made_up_tokens(name, NONCE_TOKENS))
