"""What is measured of a request and what it means: every definition once."""

from __future__ import annotations

from preble.metrics.records import RequestRecord
from preble.metrics.summary import Slo, Summary, summarize

__all__ = ["RequestRecord", "Slo", "Summary", "summarize"]
