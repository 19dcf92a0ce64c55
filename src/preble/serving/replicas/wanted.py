"""Which replicas are wanted, by everybody who has a say: the configuration, DNS, Kubernetes, and operators. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from preble.config import ReplicaConfig
from preble.discovery import Member
from preble.errors import RequestError

BY_HAND = "api"
"""The source that operators are. It has no say after a restart."""
DRAINED_BY_HAND = "drained by an operator"


class Conflict(RequestError):
    """Another source names the replica, with other settings."""

    status = 409
    code = "conflict"


class UnknownReplica(RequestError):
    """No source names the replica, and none is there."""

    status = 404
    code = "replica_not_found"


class WantedReplicas:
    """The last set of each source, and what operators have drained or removed.

    Where several sources name a URL, the one that was set first counts, and operators come last. What an operator
    drains or removes stays so, whatever the sources say, until it is undone, or until no source names it any more.
    """

    def __init__(self) -> None:
        self._by_source: dict[str, dict[str, Member]] = {}
        self._by_hand: dict[str, Member] = {}
        self._drained: set[str] = set()
        self._removed: set[str] = set()

    def set(self, source: str, members: Iterable[Member]) -> None:
        """A source names these from now on, and no others. Of two at one URL, one that gets requests counts."""
        held_back_first = sorted(members, key=lambda member: member.held_back is None)
        self._by_source[source] = {member.url: member for member in held_back_first}
        self._prune()

    def forget(self, source: str) -> None:
        """A source has no say any more."""
        self._by_source.pop(source, None)
        self._prune()

    def named(self, url: str) -> ReplicaConfig | None:
        """Return what a source, other than an operator, says of a URL; None if none names it."""
        return next((members[url].replica for members in self._by_source.values() if url in members), None)

    def add(self, replica: ReplicaConfig) -> bool:
        """Note that an operator wants the replica; a removal is undone. Return whether it was not wanted before.

        Raises: Conflict: a source names it with other settings.
        """
        url = replica.url
        named = self.named(url)
        if named not in (None, replica):
            raise Conflict(f"the configuration or discovery names {url} with other settings; change them there")
        is_new = url in self._removed or (named is None and url not in self._by_hand)
        self._removed.discard(url)
        if named is None:
            self._by_hand[url] = Member(replica)
        return is_new

    def drain(self, url: str) -> None:
        """An operator wants no new requests there. Raises: UnknownReplica."""
        self._require(url)
        self._drained.add(url)

    def undrain(self, url: str) -> None:
        """An operator wants requests there again. Raises: UnknownReplica."""
        self._require(url)
        self._drained.discard(url)

    def remove(self, url: str) -> None:
        """An operator does not want the replica, although a source may name it. Raises: UnknownReplica."""
        self._require(url)
        self._by_hand.pop(url, None)
        self._removed.add(url)
        self._prune()

    def merged(self) -> dict[str, Member]:
        """Return the wanted members by URL."""
        merged: dict[str, Member] = {}
        for members in (*self._by_source.values(), self._by_hand):
            for url, member in members.items():
                if url not in self._removed:
                    merged.setdefault(url, member)
        for url in self._drained & merged.keys():
            merged[url] = replace(merged[url], held_back=DRAINED_BY_HAND)
        return merged

    def source_of(self, url: str) -> str | None:
        """Return the source whose settings count for a URL; None if nobody wants it."""
        if url in self._removed:
            return None
        found = (source for source, members in self._by_source.items() if url in members)
        return next(found, BY_HAND if url in self._by_hand else None)

    def _require(self, url: str) -> None:
        if self.source_of(url) is None:
            raise UnknownReplica(f"there is no replica {url[:200]!r}; GET /replicas lists those there are", param="url")

    def _prune(self) -> None:
        named = {url for members in (*self._by_source.values(), self._by_hand) for url in members}
        self._removed &= named
        self._drained &= named - self._removed
