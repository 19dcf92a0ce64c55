"""Which replica has stored which response: a request to continue, read or cancel one must go there."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict

from preble.core.types import ReplicaId, Role
from preble.engines import Engine
from preble.errors import EngineError
from preble.rules.callers import Caller
from preble.serving.replicas.live import LiveReplicas

_MOST_REMEMBERED = 100_000
_ID = re.compile(r"\w[\w.:-]{0,199}", re.ASCII)


class StoredResponses:
    """Remembers which replica has which response. Asks the replicas for others, which may be older than the gateway."""

    def __init__(self, replicas: LiveReplicas) -> None:
        self._replicas = replicas
        self._holders: OrderedDict[str, tuple[ReplicaId, str]] = OrderedDict()

    def note(self, response_id: str, replica_id: ReplicaId, tenant: str) -> None:
        """The replica has answered the tenant with a response of this id."""
        self._holders[response_id] = replica_id, tenant
        self._holders.move_to_end(response_id)
        if len(self._holders) > _MOST_REMEMBERED:
            self._holders.popitem(last=False)

    async def holder(self, response_id: str, caller: Caller) -> ReplicaId | None:
        """Return the live replica that has the response, None if none has. Asks all of them if it is not known.

        A caller with a key has only what a key of its tenant was answered through this process: replicas do not know
        whose a response is.
        """
        if not _ID.fullmatch(response_id):
            return None
        known, tenant = self._holders.get(response_id, (None, ""))
        if caller.name and tenant != caller.tenant:
            return None
        if known is not None and known in self._replicas:
            return known
        those = self._replicas.values()
        engines = [replica.engine for replica in those if replica.info.spec.role is not Role.PREFILL]
        answers = await asyncio.gather(*(_has(engine, response_id) for engine in engines))
        found = next((engine.replica_id for engine, has in zip(engines, answers, strict=True) if has), None)
        if found is not None:
            self.note(response_id, found, caller.tenant)
        return found


async def _has(engine: Engine, response_id: str) -> bool:
    try:
        return (await engine.http.ask(f"/v1/responses/{response_id}")).status == 200
    except EngineError:
        return False
