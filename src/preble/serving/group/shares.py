"""What the gateways of a group share besides their requests: ejected replicas, and what keys and tenants have used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from preble.core.admission.admission import FairAdmission
from preble.core.types import ReplicaId
from preble.peers.packets import Ejected, Message, Used
from preble.rules.ejection import Change, EjectionReason, EjectionTable, Standing
from preble.rules.key_limits import KeyLimits


@dataclass(frozen=True, slots=True)
class Shares:
    """This gateway's tables that its peers add to."""

    ejection: EjectionTable
    key_limits: KeyLimits
    admission: FairAdmission

    def follow(self, tell: Callable[[Message], None]) -> None:
        """Report each ejection to peers from now on, but for those that a peer reported."""

        def changed(change: Change) -> None:
            if change.standing is Standing.EJECTED and change.reason is not EjectionReason.PEER:
                tell(Ejected(change.replica_id))

        self.ejection.listen(changed)

    def untold(self) -> Used | None:
        """Return what keys and tenants have used here since the last call, None if nothing."""
        keys, tenants = self.key_limits.take_untold(), self.admission.take_untold()
        return Used(tuple(keys), tuple(tenants.items())) if keys or tenants else None

    def take(self, message: Ejected | Used, now: float) -> None:
        """Apply a peer's report: an ejection, or what its keys and tenants used."""
        if isinstance(message, Ejected):
            self.ejection.failed_elsewhere(ReplicaId(message.replica), now)
            return
        for name, requests, tokens in message.keys:
            self.key_limits.used_elsewhere(name, requests, tokens, now)
        for tenant, seconds in message.tenants:
            self.admission.used_elsewhere(tenant, seconds)
