"""Recorded traces and workloads that lie beside the checkout where there are any; a clone has none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).parents[3] / "shared" / "data"

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"there are no recorded traces in {DATA}")
