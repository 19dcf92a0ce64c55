"""Sets of replicas as bit masks: bit i stands for the replica of index i."""

from __future__ import annotations

_BITS_OF = tuple(tuple(bit for bit in range(8) if byte >> bit & 1) for byte in range(256))


def replicas_in(mask: int) -> list[int]:
    """The set bits of a mask, lowest first. O(set bits + length of the mask / 8).

    >>> slots_of(0b1011)
    [0, 1, 3]
    """
    replicas: list[int] = []
    start = 0
    for byte in mask.to_bytes((mask.bit_length() + 7) // 8, "little"):
        if byte:
            for bit in _BITS_OF[byte]:
                replicas.append(start + bit)  # noqa: PERF401  (this loop is what the compiler makes fast)
        start += 8
    return replicas
