"""A replica as a source names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from preble.config import GroupConfig, ReplicaConfig
from preble.web.urls import server_url


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that is wanted.

    `incarnation`: changes when another program answers at the same address, whose cache is empty; "" where unknown.
    `held_back`: why it gets no new requests; None if it gets some.
    """

    replica: ReplicaConfig
    incarnation: str = ""
    held_back: str | None = None

    @property
    def url(self) -> str:
        return self.replica.url

    def is_same_replica(self, other: Member) -> bool:
        """Return whether both are one program, spoken to in one way."""
        return (self.replica, self.incarnation) == (other.replica, other.incarnation)


def member_at(
    group: GroupConfig,
    address: str,
    port: int,
    *,
    incarnation: str = "",
    held_back: str | None = None,
    settings: Mapping[str, str | int] | None = None,
) -> Member:
    """Return the member of a group at an address. `settings`: of the group, which this member has otherwise."""
    if settings:
        group = msgspec.structs.replace(group, **settings)
    host = f"[{address}]" if ":" in address else address

    def zmq(zmq_port: int | None) -> str | None:
        return None if zmq_port is None else f"tcp://{host}:{zmq_port}"

    replica = ReplicaConfig(
        url=server_url(f"{group.scheme}://{host}:{port}"),
        engine=group.engine,
        kv_events=zmq(group.kv_events_port),
        kv_events_replay=zmq(group.kv_events_replay_port),
        kv_events_topic=group.kv_events_topic,
        role=group.role,
        transfer_group=group.transfer_group,
    )
    return Member(replica, incarnation, held_back)
