"""What each source of members has: a name, its set, and what it says when it cannot look. Which sources there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

import structlog

from preble.background import Backoff
from preble.config import DiscoveryConfig, GroupConfig
from preble.discovery.member import Member
from preble.errors import ConfigError

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0


class Source(ABC):
    """Names replicas. `error`: why what it named last may be out of date; None while it is not."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: str | None = None
        self._backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)

    @abstractmethod
    def members(self) -> AsyncIterator[tuple[Member, ...]]:
        """Yield the wanted members, at first and whenever they change, without end.

        While a source cannot look, it yields nothing, so that what it named last stays.
        """

    def failed(self, error: BaseException, consequence: str = "the replicas known so far stay") -> float:
        """Note that a look has failed; each new reason is logged. Return the seconds until the next try."""
        reason = (str(error) or type(error).__name__)[:200]
        if reason != self.error:
            self.error = reason
            structlog.get_logger().warning("members_unknown", source=self.name, error=reason, consequence=consequence)
        return self._backoff.next_s()

    def worked(self) -> None:
        """Note that a look has succeeded."""
        if self.error is not None:
            structlog.get_logger().info("members_known_again", source=self.name)
        self.error = None
        self._backoff.reset()


def make_source(group: GroupConfig, settings: DiscoveryConfig) -> Source:
    """Return the source of a group's members. Looks nothing up yet.

    Raises: ConfigError: the group is incomplete, or the library for it is not installed.
    """
    name = group.name
    try:
        if group.dns or group.srv:
            from preble.discovery.dns import DnsSource

            return DnsSource(name, group, settings)
        from preble.discovery.kubernetes import KubernetesSource

        return KubernetesSource(name, group, settings)
    except ImportError as error:
        extra = "dns" if group.dns or group.srv else "k8s"
        raise ConfigError(f"group {name!r} needs more libraries ({error}): pip install 'preble[{extra}]'") from error
