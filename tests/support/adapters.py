"""Model adapters for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.replicas import ROOT


def make_tiny_lora(python: Path, target: Path) -> Path:
    """Make a LoRA adapter for the tiny model with an engine's own Python; returns its folder."""
    program = [str(python), str(ROOT / "tests" / "support" / "make_tiny_lora.py"), str(target)]
    subprocess.run(program, check=True, capture_output=True)
    return target
