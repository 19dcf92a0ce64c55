"""Replicas as gateways know them: by `ADDRESS:PORT`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from preble.core.types import Placement, ReplicaId
from preble.errors import ConfigError, NoReplicaError
from preble.serving import LiveReplica

MOST_DESTINATIONS = 3
"""The chosen endpoint, and those that the gateway may try if it cannot be reached."""

Live = Mapping[ReplicaId, LiveReplica]


def address_of(url: str) -> str:
    """Return the address and port of a replica's URL.

    >>> address_of("http://10.0.0.1:8000"), address_of("http://[::1]:8000")
    ('10.0.0.1:8000', '[::1]:8000')
    """
    return url.partition("//")[2]


def require_address(url: str) -> None:
    """Raises: ConfigError: a gateway cannot be sent to this replica.

    >>> require_address("http://10.0.0.1:8000")
    """
    parts = urlsplit(url)
    try:
        ip_address(parts.hostname or "")
    except ValueError as error:
        raise ConfigError(f"replica {url}: gateways are sent to IP addresses; give the address, not a name") from error
    if parts.scheme != "http" or parts.port is None or parts.path.strip("/"):
        raise ConfigError(f"replica {url}: gateways are sent to ADDRESS:PORT; give http://ADDRESS:PORT")


def is_among(url: str, subset: frozenset[str]) -> bool:
    """Return whether a subset has a replica's endpoint, or its address without a port.

    >>> subset = frozenset({"10.0.0.1:8000", "10.0.0.2"})
    >>> [is_among(f"http://{endpoint}", subset) for endpoint in ("10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8000")]
    [True, False, True]
    """
    address = address_of(url)
    return address in subset or address.rpartition(":")[0] in subset


def outside(live: Live, subset: frozenset[str] | None) -> frozenset[ReplicaId]:
    """Return the live replicas that a gateway's subset rules out. Raises: NoReplicaError: it rules out all."""
    if subset is None:
        return frozenset()
    others = frozenset(replica_id for replica_id, one in live.items() if not is_among(one.engine.url, subset))
    if len(others) == len(live):
        raise NoReplicaError("no replica is among the endpoints that the gateway allows")
    return others


def replica_at(live: Live, endpoint: str) -> ReplicaId | None:
    """Return the first live replica at an endpoint, None if there is none."""
    return next((replica_id for replica_id, one in live.items() if address_of(one.engine.url) == endpoint), None)


def destinations(live: Live, placement: Placement) -> str:
    """Return the endpoint of a placement and then the next best ones, as gateways take them."""
    weighed = sorted(placement.candidates, key=lambda candidate: candidate.cost_s)
    return joined(live, [placement.replica_id, *(candidate.replica_id for candidate in weighed)])


def joined(live: Live, replica_ids: Iterable[ReplicaId]) -> str:
    """Return the endpoints of the first live replicas, each once."""
    endpoints = dict.fromkeys(address_of(live[one].engine.url) for one in replica_ids if one in live)
    return ",".join([*endpoints][:MOST_DESTINATIONS])
