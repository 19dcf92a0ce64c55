"""Requests of which replicas die: recognised by the deaths that they were at, and refused for a while.

A replica that dies had many requests at once. One death does not show of which of them it died, or whether of any. So
every request that had no answer yet is a suspect, by what it is like (prompt, namespace, key), until a request like it
is answered. If replicas die again, the one suspect that was at more deaths than all others of that time is taken for
the cause. Where several were at as many, none is: each is answered elsewhere, which clears it, or dies with others.

What dies within `ONE_INCIDENT_S` counts as one death, for one cause may end several replicas: a host, an operator.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b

from preble.core.types import ReplicaId, Request

ONE_INCIDENT_S = 1.0
QUARANTINE_S = 300.0
"""How long the like of a request is refused after the last death."""
SUSPECTED_S = 3600.0
"""How long a death counts."""
MOST_SUSPECTS = 4096


@dataclass(slots=True)
class _Incident:
    """Replicas that died at about the same time. `suspects`: at how many deaths each had been by then."""

    began_at: float
    suspects: dict[bytes, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Suspect:
    """`last`: the last incident that it was at."""

    last: _Incident
    deaths: int = 0
    replicas: list[ReplicaId] = field(default_factory=list)


class Quarantine:
    """The suspects, those without news for longest forgotten first. Time is an argument, in seconds; O(1) but for
    suspects that are asked about."""

    def __init__(self) -> None:
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()
        self._incident = _Incident(float("-inf"))

    def __len__(self) -> int:
        return len(self._suspects)

    def died(self, like: bytes, replica_id: ReplicaId, now: float) -> None:
        """A replica has died that had such a request, without an answer."""
        if now >= self._incident.began_at + ONE_INCIDENT_S:
            self._incident = _Incident(now)
        incident, suspect = self._incident, self._suspects.get(like)
        if suspect is None or suspect.last.began_at + SUSPECTED_S < now:
            suspect = self._suspects[like] = _Suspect(incident)
        if like not in incident.suspects:
            suspect.last = incident
            suspect.deaths += 1
            suspect.replicas = [*suspect.replicas[-1:], replica_id]
            incident.suspects[like] = suspect.deaths
        self._suspects.move_to_end(like)
        if len(self._suspects) > MOST_SUSPECTS:
            self._suspects.popitem(last=False)

    def answered(self, like: bytes) -> None:
        """Such a request was answered well."""
        self._suspects.pop(like, None)

    def held(self, like: bytes, now: float) -> list[ReplicaId]:
        """Return the replicas of which the last died of such a request; none if it may be placed."""
        suspect = self._suspects.get(like)
        if suspect is None or suspect.deaths < 2 or now >= suspect.last.began_at + QUARANTINE_S:
            return []
        others = (
            deaths for other, deaths in suspect.last.suspects.items() if other in self._suspects and other != like
        )
        return suspect.replicas if all(deaths < suspect.deaths for deaths in others) else []


def likeness(request: Request, key: str) -> bytes:
    """Return what requests with the same prompt, namespace and key have in common. O(length)."""
    name = f"{len(request.namespace)}:{request.namespace}{key}".encode()
    return blake2b(request.prompt, digest_size=16, key=blake2b(name, digest_size=32).digest()).digest()
