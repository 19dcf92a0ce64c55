"""How evenly work is spread over replicas."""

from __future__ import annotations

import math
from collections.abc import Collection


def load_imbalance(busy_s: Collection[float]) -> float | None:
    """Return the busiest replica's GPU seconds divided by the average replica's; 1 is perfectly even.

    None when no replica computed anything.

    >>> load_imbalance([3.0, 1.0, 2.0, 2.0])
    1.5
    """
    total = math.fsum(busy_s)
    return max(busy_s) * len(busy_s) / total if total else None
