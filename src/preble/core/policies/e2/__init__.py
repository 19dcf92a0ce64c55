"""The paper's policy, with the books and the settings that it alone needs."""

from preble.core.policies.e2.policy import E2 as E2
from preble.core.policies.e2.rebalance import RebalanceSettings as RebalanceSettings
