"""Replicas by index, and sets of them as bit masks.

A scheduler gives each replica a small integer: a position in lists, a bit in a mask. An index is used again after its
replica has left. Outside the scheduler a replica is named by its `ReplicaId`.
"""

from __future__ import annotations

from typing import NewType

ReplicaIndex = NewType("ReplicaIndex", int)

ReplicaSet = int
"""Bit i is set if the replica of index i belongs to the set."""

_BITS_OF = tuple(tuple(bit for bit in range(8) if byte >> bit & 1) for byte in range(256))


def replicas_in(mask: ReplicaSet) -> list[ReplicaIndex]:
    """Return the members of a set, lowest index first. O(members + length of the mask / 8).

    >>> replicas_in(0b1011)
    [0, 1, 3]
    """
    replicas: list[ReplicaIndex] = []
    start = 0
    for byte in mask.to_bytes((mask.bit_length() + 7) // 8, "little"):
        if byte:
            for bit in _BITS_OF[byte]:
                replicas.append(ReplicaIndex(start + bit))  # noqa: PERF401  (this loop is what the compiler makes fast)
        start += 8
    return replicas
