"""An open-loop load generator for any OpenAI-compatible endpoint, and its measurements."""

from __future__ import annotations

from preble.lab.bench.run import BenchResult, BenchRun, BenchSettings

__all__ = ["BenchResult", "BenchRun", "BenchSettings"]
