"""Goodput: the requests a second whose answers came as soon as they were asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from preble.core.types import Target
from preble.lab.metrics.records import RequestRecord
from preble.lab.metrics.summary import Slo


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """What became of requests with targets.

    `per_s`: those in time, a second of the time in which they came. `asked`: requests; `answered`: of them, those that
    were neither refused nor failed; `in_time`: of those, the ones that met every target.
    """

    per_s: float
    asked: int
    answered: int
    in_time: int

    @property
    def share(self) -> float:
        """Of all that asked, the part that was in time."""
        return self.in_time / self.asked if self.asked else 0.0

    @property
    def kept(self) -> float:
        """Of what was answered, the part that was in time."""
        return self.in_time / self.answered if self.answered else 0.0


def goodput(records: Sequence[RequestRecord], target_of: Callable[[RequestRecord], Target], lasted_s: float) -> Goodput:
    """Return what became of the requests that came within `lasted_s` seconds. O(records).

    >>> common = {"scheduled_s": 0, "sent_s": 0, "end_s": 2.0}
    >>> records = [
    ...     RequestRecord(request_id="a", first_token_s=0.5, **common),
    ...     RequestRecord(request_id="b", first_token_s=1.5, **common),
    ...     RequestRecord(request_id="c", error="refused", **common),
    ... ]
    >>> goodput(records, lambda record: Target(ttft_s=1.0), 2.0)
    Goodput(per_s=0.5, asked=3, answered=2, in_time=1)
    """
    in_time = 0
    for record in records:
        target = target_of(record)
        in_time += Slo(ttft_s=target.ttft_s, tpot_s=target.tpot_s).is_met_by(record)
    return Goodput(
        per_s=in_time / lasted_s if lasted_s > 0 else 0.0,
        asked=len(records),
        answered=sum(record.ok for record in records),
        in_time=in_time,
    )
