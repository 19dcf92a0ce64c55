"""A scheduler that splits every request that it may, for tests of what carries splits out."""

from __future__ import annotations

from pathlib import Path
from random import Random

from preble.core.costs.model import CostModel
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.transfers import TransferOptions
from preble.core.policies.view import Choice, ClusterView
from preble.core.types import Reason, ReplicaId
from preble.profiles import load_profile


class _AlwaysSplits:
    """Lets `target` decode everything, and another one compute it."""

    name = "always_splits"

    def __init__(self, target: str) -> None:
        self._target = ReplicaId(target)

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        options = TransferOptions(view)
        ids = [view.cluster.replicas.specs[replica].replica_id for replica in view.replicas]
        if self._target not in ids:
            return Choice(view.replicas[0], Reason.POLICY)
        target = ids.index(self._target)
        for members in options.splitting:
            others = [i for i in members if i != target]
            if target in members and others and (split := options.split(others[0], target, 0.0)) is not None:
                return Choice(view.replicas[target], Reason.POLICY, (), split)
        return Choice(view.replicas[target], Reason.POLICY)


def always_splitting(profile: Path, target: str) -> GlobalScheduler:
    """A scheduler by which the replica `target` decodes everything."""
    return GlobalScheduler(_AlwaysSplits(target), CostModel(load_profile(str(profile))))
