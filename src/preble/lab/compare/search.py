"""Finding a capacity without knowing any rate: doubling from a coarse start, then bisection.

Rates come from one lattice, eight to a doubling, so that policies and seeds are tried at the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import log2

PER_DOUBLING = 8
"""Rates of the lattice to a doubling: neighbours are 9 % apart, and a capacity is interpolated between two of them."""
MAX_DOUBLINGS = 10
"""Above the start; what holds there holds everything."""
MAX_HALVINGS = 6
"""Below the start; what does not hold there is given up."""
TYPICAL_RUNS = 9
"""That a search takes; for estimates of what is left."""


def lattice_rate(step: int) -> float:
    """Return requests a second at a step of the lattice, to four digits.

    >>> [lattice_rate(step) for step in (-8, 0, 1, 8)]
    [0.5, 1.0, 1.091, 2.0]
    """
    return float(f"{2 ** (step / PER_DOUBLING):.4g}")


def start_step(num_replicas: int, *, is_cut_short: bool = False) -> int:
    """Return where a search starts: about one request a second and replica.

    `is_cut_short`: a run that is overloaded ends early, so that it costs less to come from above.

    >>> lattice_rate(start_step(4)), lattice_rate(start_step(4, is_cut_short=True))
    (4.0, 16.0)
    """
    return PER_DOUBLING * (max(num_replicas, 1).bit_length() + (1 if is_cut_short else -1))


def nearest_step(rate: float) -> int:
    """Return the step of the lattice next to a rate.

    >>> nearest_step(lattice_rate(13))
    13
    """
    return round(PER_DOUBLING * log2(rate))


def search_steps(start: int, *, is_near: bool = False) -> Generator[int, bool, None]:
    """Yield steps to try and is sent whether each holds; ends with a step that holds next to one that does not.

    `is_near`: the capacity is probably next to the start, so that the strides begin with one step and double.
    """
    holds = yield start
    stride = 1 if is_near else PER_DOUBLING
    near = start
    limit = PER_DOUBLING * (MAX_DOUBLINGS if holds else MAX_HALVINGS)
    while True:
        far = near + (stride if holds else -stride)
        if (yield far) != holds:
            break
        near = far
        if abs(near - start) >= limit:
            return
        stride = min(2 * stride, PER_DOUBLING)
    low, high = sorted((near, far))
    while high - low > 1:
        middle = (low + high) // 2
        if (yield middle):
            low = middle
        else:
            high = middle


def follow(
    start: int, holds_at: Callable[[float], bool | None], *, is_near: bool = False
) -> tuple[list[float], float | None]:
    """Return the rates that a search from `start` has tried so far, and the one to try next; None when it is over.

    `holds_at`: whether a rate holds, None where that is not known yet. `is_near`: see `search_steps`.
    """
    tried: list[float] = []
    steps = search_steps(start, is_near=is_near)
    step = next(steps)
    while (holds := holds_at(rate := lattice_rate(step))) is not None:
        tried.append(rate)
        try:
            step = steps.send(holds)
        except StopIteration:
            return tried, None
    return tried, rate
