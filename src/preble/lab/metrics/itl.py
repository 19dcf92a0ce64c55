"""Inter-token latency (ITL): the gap between one token of an answer and the next, as its client sees it.

Every gap of every answer counts once, so an iteration counts for each sequence that waits for it. A request's TPOT is
the mean of its gaps, which hides the long ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

LEAST_GAP_S = 1e-6
"""Shorter gaps count as this long."""
_STEP = math.log(1.01)

GapCounts = dict[int, int]
"""Gaps by their `gap_key`: as many entries as there are lengths, however many tokens."""


class Itl(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of the gaps between tokens, in seconds, to half a percent."""

    p50_s: float
    p99_s: float
    p999_s: float


def gap_key(seconds: float) -> int:
    """Return the key of a gap: gaps within one percent share one.

    >>> gap_key(0.1) == gap_key(0.1002), gap_key(0.1) == gap_key(0.102)
    (True, False)
    """
    return int(math.log(max(seconds, LEAST_GAP_S) / LEAST_GAP_S) / _STEP)


def gap_s(key: int) -> float:
    """Return the gap in the middle of those with this key, in seconds."""
    return LEAST_GAP_S * math.exp(_STEP * (key + 0.5))


def itl(counts: Iterable[Mapping[int, int]]) -> Itl | None:
    """Return the percentiles of all gaps together; None for no gaps.

    >>> found = itl([{gap_key(0.02): 990}, {gap_key(0.2): 10}])
    >>> round(found.p50_s, 3), round(found.p99_s, 3), round(found.p999_s, 2)
    (0.02, 0.02, 0.2)
    """
    total: Counter[int] = Counter()
    for gaps in counts:
        total.update(gaps)
    if not total:
        return None
    p50, p99, p999 = (_at_share(total, share) for share in (0.5, 0.99, 0.999))
    return Itl(p50_s=p50, p99_s=p99, p999_s=p999)


def _at_share(total: Counter[int], share: float) -> float:
    """Return the shortest gap that this share of the gaps does not exceed."""
    needed, seen, key = share * total.total(), 0, 0
    for key in sorted(total):
        seen += total[key]
        if seen >= needed:
            break
    return gap_s(key)
