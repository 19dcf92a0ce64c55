"""The generator of dashboard, alerts and the metrics' page, which is no part of the package."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

from preble.serving.telemetry.table import BY_NAME, Kind

ROOT = Path(__file__).parents[2]
PARTS = ("_bucket", "_sum", "_count")


def generator(name: str) -> ModuleType:
    """One of its modules: generate, metrics_page, dashboard or alerts."""
    folder = str(ROOT / "dev" / "monitoring")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def declared_name(series: str) -> str | None:
    """The metric in the table to which a series belongs, such as `preble_ttft_seconds_bucket`; None: there is none."""
    if series in BY_NAME:
        return series if BY_NAME[series].kind is not Kind.HISTOGRAM else None
    base, part = re.sub(r"_(bucket|sum|count)$", "", series), series[series.rfind("_") :]
    return base if part in PARTS and base in BY_NAME and BY_NAME[base].kind is Kind.HISTOGRAM else None
