"""Writes what is made from the metrics' table: their page, the Grafana dashboard and the alert rules."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import alerts
import dashboard
import metrics_page

ROOT = Path(__file__).parents[2]
FILES = {
    "docs/reference/metrics.md": metrics_page.metrics_page,
    "deploy/grafana/preble.json": dashboard.dashboard,
    "deploy/prometheus/alerts.yml": alerts.rules,
}

if __name__ == "__main__":
    for name, make in FILES.items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make(), encoding="utf-8")
