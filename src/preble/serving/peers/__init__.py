"""The group of gateways that this one belongs to: `group` drives its part, `nats` carries the packets."""

from __future__ import annotations

from preble.serving.peers.group import Group
from preble.serving.peers.shares import Shares

__all__ = ["Group", "Shares"]
