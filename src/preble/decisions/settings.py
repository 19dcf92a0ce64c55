"""The settings that a scheduler's decisions depend on, besides the calls."""

from __future__ import annotations

import msgspec

from preble.core.costs.model import CostModel, CostProfile
from preble.core.costs.refit import RefitSettings
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.policy import Policy
from preble.core.types import NOTHING_LEARNED, Learned
from preble.plugins.policies import make_policy


class SchedulerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The arguments of `GlobalScheduler`, by their names; `policy` by name, with its own settings if it has any.

    Each log has them in its header.
    """

    policy: str = "preble"
    seed: int = 0
    window_s: float = 180.0
    report_grace_s: float = 1.0
    belief_ttl_s: float = 600.0
    index_budget_bytes: int | None = None
    refit: bool = False


def make_scheduler(
    settings: SchedulerSettings,
    profile: CostProfile,
    policy: Policy | None = None,
    learned: Learned = NOTHING_LEARNED,
) -> GlobalScheduler:
    """Return a scheduler without replicas. Equal arguments and equal calls make equal decisions.

    `policy`: a fresh one, instead of the one that `settings` names. `learned`: what it begins with.
    Raises: ConfigError: no such policy.
    """
    return GlobalScheduler(
        policy if policy is not None else make_policy(settings.policy),
        CostModel(profile),
        seed=settings.seed,
        window_s=settings.window_s,
        report_grace_s=settings.report_grace_s,
        belief_ttl_s=settings.belief_ttl_s,
        index_budget_bytes=settings.index_budget_bytes,
        refit=RefitSettings() if settings.refit else None,
        learned=learned,
    )
