"""The group of gateways that this one belongs to: `group` drives its part, `nats` or another bus carries packets."""

from __future__ import annotations

from preble.serving.peers.bus import NewBus
from preble.serving.peers.group import Group
from preble.serving.peers.nats import NatsBus
from preble.serving.peers.secret import has_secret, packet_keys
from preble.serving.peers.shares import Shares

__all__ = ["Group", "NatsBus", "NewBus", "Shares", "has_secret", "packet_keys"]
