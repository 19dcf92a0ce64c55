"""What is measured and how it is defined, each definition once."""

from __future__ import annotations

from preble.lab.metrics.records import RequestRecord
from preble.lab.metrics.summary import Slo, Summary, summarize

__all__ = ["RequestRecord", "Slo", "Summary", "summarize"]
