"""What to do so that the replicas that are present become those that are wanted. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from preble.discovery import Member

NOT_WANTED = "no source names it any more"


@dataclass(frozen=True, slots=True)
class Present:
    """A replica that is watched. `held_back`: why it gets no new requests. `is_idle`: no request runs there."""

    member: Member
    held_back: str | None
    is_idle: bool


@dataclass(frozen=True, slots=True)
class Join:
    """Watch a new replica."""

    member: Member


@dataclass(frozen=True, slots=True)
class Replace:
    """Watch a replica as another one: its settings have changed, or another program answers there.

    What runs there ends; what was known of its cache is forgotten.
    """

    member: Member


@dataclass(frozen=True, slots=True)
class HoldBack:
    """Give a replica no new requests (`reason`), or some again (None). Its cache stays known."""

    url: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class Remove:
    """Leave a replica on which nothing runs."""

    url: str


Step = Join | Replace | HoldBack | Remove


def plan(wanted: Mapping[str, Member], present: Mapping[str, Present]) -> list[Step]:
    """Return the steps from what is present to what is wanted, by URL: none for a replica that is as it should be.

    A replica that is not wanted is held back until it is idle, then removed. O(replicas).
    """
    steps: list[Step] = []
    for url, member in wanted.items():
        there = present.get(url)
        if there is None:
            steps.append(Join(member))
        elif not there.member.is_same_replica(member):
            steps.append(Replace(member))
        elif there.held_back != member.held_back:
            steps.append(HoldBack(url, member.held_back))
    for url, there in present.items():
        if url in wanted:
            continue
        if there.is_idle:
            steps.append(Remove(url))
        elif there.held_back != NOT_WANTED:
            steps.append(HoldBack(url, NOT_WANTED))
    return steps
