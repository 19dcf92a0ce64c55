"""From a group in the configuration to the source that follows it."""

from __future__ import annotations

from preble.config import DiscoveryConfig, GroupConfig
from preble.discovery.source import Source
from preble.errors import ConfigError


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
