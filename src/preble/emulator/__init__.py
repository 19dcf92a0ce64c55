"""An emulated replica: vLLM's interface and a profile's timing, without a model. Every answer says what it is."""

from __future__ import annotations

from preble.emulator.config import EmulatorConfig
from preble.emulator.server import EmulatorServer, run

__all__ = ["EmulatorConfig", "EmulatorServer", "run"]
