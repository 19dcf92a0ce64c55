"""`PrebleRouter`, for `request_router_config` of any Ray Serve deployment.

Ray copies this module into each router, by value. So what the routers of one process share is imported where it is
used: from `placing`, which each process has once.
"""

from __future__ import annotations

from typing import Any

from ray.serve.context import _get_internal_replica_context
from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)


class PrebleRouter(RequestRouter):  # type: ignore[misc]
    """Sends each request where the scheduler places it: by the cached prefix, the load and the cost of evictions.

    A request without a prompt, and one that cannot be placed, goes to the replica with the fewest requests.
    """

    def initialize_state(self, **settings: Any) -> None:
        """`settings`: as `request_router_config` has checked them. Raises: ConfigError."""
        from preble.integrations.ray.settings import config_of

        self._config = config_of(settings)

    @property
    def placer(self) -> Any:
        """What places for this deployment in this process."""
        from preble.integrations.ray.placing import placer_of

        return placer_of(str(self._deployment_id), self._config)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.placer.update_replicas((replica.replica_id.unique_id, replica.routing_stats) for replica in replicas)
        if _get_internal_replica_context() is not None:  # not in proxies and drivers, which may never send anything
            self.placer.start()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # or a full replica makes Ray ask without a pause
        chosen = await self.placer.choose(pending_request)
        first = [replica for replica in candidate_replicas if replica.replica_id.unique_id == chosen]
        rest = [replica for replica in candidate_replicas if replica.replica_id.unique_id != chosen]
        return [first, rest]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self.placer.ended(internal_request_id)
