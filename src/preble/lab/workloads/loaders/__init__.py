"""Workloads from the files that people have: one small module a format, and `load`, which finds out which it is."""

from __future__ import annotations

from preble.lab.workloads.loaders.detect import format_names, load
from preble.lab.workloads.loaders.options import LoadOptions

__all__ = ["LoadOptions", "format_names", "load"]
