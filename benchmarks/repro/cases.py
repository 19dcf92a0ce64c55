"""What scripts that play named cases with several seeds have in common: their options, and changes in a table."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence

from preble.lab.metrics.estimates import estimate

Play = Callable[[list[str], tuple[int, ...], int], None]
"""Plays cases with seeds in so many processes, and keeps the results."""


def play_and_draw(
    about: str, cases: Mapping[str, object], seeds: Sequence[int], play: Play, draw: Callable[[], None]
) -> None:
    """Do what the command line asks for: play the cases, or those of `--case` and `--seed`, and fill in the page."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=[*cases])
    parser.add_argument("--seed", action="append", type=int)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--draw", action="store_true")
    given = parser.parse_args()
    if not given.draw:
        play(given.case or [*cases], tuple(given.seed or seeds), given.jobs)
    draw()


def change(values: Sequence[float], others: Sequence[float]) -> str:
    """Return by how much values differ from others, pair by pair: the mean and half of its interval, in per cent."""
    found = estimate([100 * (value / other - 1) for value, other in zip(values, others, strict=True)])
    half = "" if found.half_width is None else f" ± {found.half_width:.0f}"
    return f"{found.mean:+.0f}{half} %"
