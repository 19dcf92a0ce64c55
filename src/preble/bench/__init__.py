"""Load from outside: an open-loop generator for any OpenAI-compatible endpoint, and what it measured."""

from __future__ import annotations

from preble.bench.run import BenchResult, BenchRun, BenchSettings

__all__ = ["BenchResult", "BenchRun", "BenchSettings"]
