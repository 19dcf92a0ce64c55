"""What pages and metrics show of the replicas that are watched, and of the sources that name them."""

from __future__ import annotations

import msgspec

from preble.core.types import Role


class MemberRow(msgspec.Struct, frozen=True):
    """One replica that is watched, whether or not it is up.

    `state`: "joining" (never up yet), "live", "down" (was up), "draining" (gets no new requests, some run) or "drained"
    (none run). `held_back`: why it gets no new requests. `source`: who names it; None: nobody any more. `running`:
    requests there. `safe_to_remove`: it gets no new requests and none run. `last_error`: why it is not up, None if
    it is. `replicas`: its ids in the scheduler: one for each data-parallel rank. `role`, `transfer_group`: see
    `ReplicaSpec`; None while it is not up, so that nobody knows.
    """

    url: str
    state: str
    source: str | None
    held_back: str | None
    running: int
    safe_to_remove: bool
    last_error: str | None
    replicas: tuple[str, ...]
    role: Role | None = None
    transfer_group: str | None = None


class SourceRow(msgspec.Struct, frozen=True):
    """One source. `replicas`: how many it names. `error`: why that may be out of date; None if it is not."""

    name: str
    replicas: int
    error: str | None
