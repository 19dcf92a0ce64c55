"""Workloads from the files that people have: a small module a format, and `read_trace`, which tells them apart."""

from __future__ import annotations

from preble.lab.workloads.loaders.detect import format_names, read_trace
from preble.lab.workloads.loaders.options import LoadOptions

__all__ = ["LoadOptions", "format_names", "read_trace"]
