"""Schedulers that split every request that they may, for tests of what carries splits out."""

from __future__ import annotations

from pathlib import Path
from random import Random

from preble.core.costs.model import CostModel
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.transfers import TransferOptions
from preble.core.policies.view import Choice, ClusterView
from preble.core.types import Reason
from preble.profiles import load_profile


class _AlwaysSplits:
    """Lets `target` decode everything, and another one compute it; None: one drawn for each request."""

    name = "always_splits"

    def __init__(self, target: str | None) -> None:
        self._target = target

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        options = TransferOptions(view)
        ids = [view.cluster.replicas.specs[replica].replica_id for replica in view.replicas]
        wanted = rng.choice(ids) if self._target is None else self._target
        if wanted not in ids:
            return Choice(view.replicas[0], Reason.POLICY)
        target = ids.index(wanted)
        for members in options.splitting:
            others = [i for i in members if i != target]
            source = rng.choice(others) if others else target
            if target in members and others and (split := options.split(source, target, 0.0)) is not None:
                return Choice(view.replicas[target], Reason.POLICY, (), split)
        return Choice(view.replicas[target], Reason.POLICY)


def always_splitting(profile: Path, target: str | None) -> GlobalScheduler:
    """A scheduler by which the replica `target` decodes everything, or any of them."""
    return GlobalScheduler(_AlwaysSplits(target), CostModel(load_profile(str(profile))))
