"""What scripts that play named cases with several seeds have in common: options, kept results, changes in a table."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from made_by import begin, note

from preble.lab.metrics.estimates import estimate

RESULTS = Path(__file__).parents[1] / "results"
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


class Measured(Protocol):
    """One run. `key`: its case, way and seed, or the like."""

    @property
    def key(self) -> tuple[Any, ...]: ...


M = TypeVar("M", bound=Measured)


class Kept(Generic[M]):
    """The runs of one script, in benchmarks/results/NAME.json. `order`: of the file. `line`: to be printed of a run."""

    def __init__(self, name: str, kind: type[M], order: Callable[[M], Any], line: Callable[[M], str]) -> None:
        self._name, self._path = name, RESULTS / f"{name}.json"
        self._kind, self._order, self._line = kind, order, line

    def known(self) -> dict[tuple[Any, ...], M]:
        if not self._path.exists():
            return {}
        return {one.key: one for one in msgspec.json.decode(self._path.read_bytes(), type=list[self._kind])}  # type: ignore[name-defined]

    def play(self, measure: Callable[..., M], wanted: Iterable[tuple[Any, ...]], jobs: int) -> None:
        """Measure what is wanted and not of today yet, in so many processes, and keep each run at once."""
        found = {} if begin(self._name) else self.known()
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            for future in as_completed([pool.submit(measure, *key) for key in wanted if key not in found]):
                one = future.result()
                found[one.key] = one
                rows = sorted(found.values(), key=self._order)
                self._path.write_bytes(b"[\n" + b",\n".join(map(msgspec.json.encode, rows)) + b"\n]\n")
                print(self._line(one), flush=True)
        note(self._name)


def change(values: Sequence[float], others: Sequence[float]) -> str:
    """Return by how much values differ from others, pair by pair: the mean and half of its interval, in per cent."""
    found = estimate([100 * (value / other - 1) for value, other in zip(values, others, strict=True)])
    half = "" if found.half_width is None else f" ± {found.half_width:.0f}"
    return f"{found.mean:+.0f}{half} %"
