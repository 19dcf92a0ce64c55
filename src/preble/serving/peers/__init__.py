"""The group of gateways that this one belongs to: `group` drives its part, `nats` carries the packets."""

from __future__ import annotations

from preble.serving.peers.group import Group

__all__ = ["Group"]
