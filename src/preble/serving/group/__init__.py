"""The group of gateways that this one belongs to: `group` drives its part, `nats` or another bus carries packets."""

from __future__ import annotations

from preble.serving.group.group import Group, NewBus
from preble.serving.group.nats import NatsBus
from preble.serving.group.secret import has_secret, packet_keys
from preble.serving.group.shares import Shares

__all__ = ["Group", "NatsBus", "NewBus", "Shares", "has_secret", "packet_keys"]
