"""How much slower one replica computes than the others, learned from live requests.

One cost profile describes all replicas of a fleet, and it may be wrong for all alike. So what is learned is relative:
the median of measured / predicted time on a replica, by that of a typical replica. Only times that other requests do
not disturb count, or those of a whole queue (`core.placing.timing_samples`), so a long queue does not make a replica
slow.

A replica's times are of prefills and of decodes, in any mixture. Where the profile is wrong for one of them, or the
replicas report another number of tokens than they made, the two disagree, and a replica with more decodes among its
last times would look slower than one with fewer. So the decodes are divided by `decode_pace` first.

Old times are dropped: a replica that gets no requests because it was slow counts as typical after `MEMORY_S`, and is
tried again. Where the last `MIN_TIMES` are all `CONTRADICTED` times as long as the median, or all that much shorter,
the earlier ones are dropped at once.
"""

from __future__ import annotations

from collections import deque
from statistics import median, median_low
from typing import Final

from preble.core.replica_index import ReplicaIndex

MEMORY_S: Final = 300.0
"""Age at which a measured time no longer counts."""

NUM_TIMES: Final = 32
"""Latest times of each replica that count; with fewer than `MIN_TIMES` nothing is concluded."""

MIN_TIMES: Final = 4
ALIKE: Final = 1.5
"""Replicas whose times differ by less than this factor count as equally fast."""

CONTRADICTED: Final = 3.0
"""A factor well above what times differ by on one replica, as its batches are full or nearly empty."""

NUM_OF_KIND: Final = 64
"""Latest prefills, and decodes, of the whole fleet by which the two are compared; not with fewer than `MIN_OF_KIND`."""

MIN_OF_KIND: Final = 16

AS_PREDICTED: Final = 2.0
"""Decodes within this factor of the prediction, or of the prefills, count as right. With a right profile they take 0.6
to 1.2 times the prediction."""

LARGEST: Final = 32.0
"""The most times as slow as a typical replica that one can count."""

_UPDATE_S: Final = 5.0


class ReplicaSpeeds:
    """The times of each replica. `slowness`: by replica index, 1.0 for a typical one; None while all are alike.

    `decode_pace`: measured / predicted time of the fleet's decodes, by that of its prefills; 1.0 where they agree.
    `next_update`: when to learn again from what was noted.
    """

    def __init__(self) -> None:
        self.slowness: list[float] | None = None
        self.decode_pace = 1.0
        self._times: dict[ReplicaIndex, deque[tuple[float, float, bool]]] = {}
        self._prefills: deque[float] = deque(maxlen=NUM_OF_KIND)
        self._decodes: deque[float] = deque(maxlen=NUM_OF_KIND)
        self._num_indexes = 0
        self.next_update = _UPDATE_S

    def note(
        self,
        replica: ReplicaIndex,
        measured_s: float,
        predicted_s: float,
        now: float,
        *,
        is_decode: bool | None = None,
    ) -> None:
        """Some work took `measured_s` on the replica, where the cost model predicts `predicted_s`. O(1).

        `is_decode`: whether it was one decode, or else one prefill; None if it was neither alone.
        """
        if measured_s <= 0 or predicted_s <= 0:
            return
        times = self._times.get(replica)
        if times is None:
            times = self._times[replica] = deque(maxlen=NUM_TIMES)
        ratio = measured_s / predicted_s
        times.append((now, ratio, is_decode is True))
        if is_decode is not None:
            (self._decodes if is_decode else self._prefills).append(ratio)

    def add_replica(self, replica: ReplicaIndex) -> None:
        """A replica joins. It counts as typical until there are times of it."""
        self._num_indexes = max(self._num_indexes, replica + 1)
        if self.slowness is not None and replica == len(self.slowness):
            self.slowness.append(1.0)

    def remove_replica(self, replica: ReplicaIndex) -> None:
        self._times.pop(replica, None)
        if self.slowness is not None and replica < len(self.slowness):
            self.slowness[replica] = 1.0

    def update(self, now: float) -> None:
        """Learn from what was noted, once it is `next_update`. O(replicas)."""
        self.next_update = now + _UPDATE_S
        self._forget_before(now - MEMORY_S)
        self._compare_kinds()
        pace = self.decode_pace
        usual: dict[ReplicaIndex, float] = {}
        for replica, times in self._times.items():
            if len(times) >= MIN_TIMES:
                usual[replica] = _usual(times, pace)
        typical = median_low(usual.values()) if usual else 1.0
        factors = {replica: min(max(ratio / typical, 1 / LARGEST), LARGEST) for replica, ratio in usual.items()}
        differ = [replica for replica, factor in factors.items() if not 1 / ALIKE <= factor <= ALIKE]
        if not differ:
            self.slowness = None
            return
        self.slowness = [1.0] * self._num_indexes
        for replica in differ:
            self.slowness[replica] = factors[replica]

    def _forget_before(self, oldest_s: float) -> None:
        for times in self._times.values():
            while times and times[0][0] < oldest_s:
                times.popleft()

    def _compare_kinds(self) -> None:
        """Find `decode_pace` anew. Prefills alone may take longer because full batches hold them back."""
        if min(len(self._decodes), len(self._prefills)) >= MIN_OF_KIND:
            decodes = median(self._decodes)
            pace = decodes / median(self._prefills)
            self.decode_pace = 1.0 if _as_predicted(decodes) or _as_predicted(pace) else pace


def _usual(times: deque[tuple[float, float, bool]], decode_pace: float) -> float:
    """Return the median of measured / predicted. Drops the times that the latest ones contradict."""
    ratios = [ratio / decode_pace if is_decode else ratio for _, ratio, is_decode in times]
    usual, latest = median(ratios), ratios[-MIN_TIMES:]
    if max(latest) * CONTRADICTED >= usual >= min(latest) / CONTRADICTED:
        return usual
    while len(times) > MIN_TIMES:
        times.popleft()
    return median(latest)


def _as_predicted(ratio: float) -> bool:
    return 1 / AS_PREDICTED <= ratio <= AS_PREDICTED
