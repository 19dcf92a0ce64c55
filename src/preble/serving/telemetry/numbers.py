"""The numbers behind the metrics: plain lists, which are added to as things happen and read at each scrape.

A gateway may be several processes. Each has its own numbers of the same table, and none for what it does not count. The
sums over all processes are the gateway's metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

from preble.serving.telemetry.table import BY_NAME, TABLE, Kind

Cell = list[float]
"""One series: a counter's or gauge's one value, or the counts of a histogram's buckets and the sum."""
Reading = tuple[str, tuple[str, ...], Cell]
"""A metric's name, its labels' values in the table's order, and the numbers."""
Reader = Callable[[], Iterable[Reading]]
_OF_REPLICAS = tuple(declared for declared in TABLE if "replica" in declared.labels)
Totals = dict[str, dict[tuple[str, ...], Cell]]


class Numbers:
    """The numbers of one process. Keep a cell that is counted often: finding it costs more than counting."""

    def __init__(self) -> None:
        self._cells: Totals = {declared.name: {} for declared in TABLE}
        self._readers: list[Reader] = []

    def cell(self, name: str, *values: str) -> Cell:
        """Return the numbers of one series, at first zeros. Raises: KeyError: the table has no such metric."""
        cells = self._cells[name]
        if (found := cells.get(values)) is None:
            found = cells[values] = [0.0] * BY_NAME[name].cell_size
        return found

    def add(self, name: str, *values: str, by: float = 1.0) -> None:
        """Add to a counter or a gauge."""
        (self._cells[name].get(values) or self.cell(name, *values))[0] += by

    def set(self, name: str, *values: str, to: float) -> None:
        """Set a gauge."""
        self.cell(name, *values)[0] = float(to)

    def observe(self, name: str, *values: str, value: float) -> None:
        """Count a value in a histogram."""
        note(self._cells[name].get(values) or self.cell(name, *values), BY_NAME[name].bounds, value)

    def sum_by(self, label: str, name: str) -> dict[str, Cell]:
        """Return the sums of a metric's series by one label; for "", that of all of them, zeros if there are none."""
        declared = BY_NAME[name]
        sums: dict[str, Cell] = {} if label else {"": [0.0] * declared.cell_size}
        for values, cell in self._cells[name].items():
            key = values[declared.labels.index(label)] if label else ""
            add(sums.setdefault(key, [0.0] * declared.cell_size), cell)
        return sums

    def read(self, reader: Reader) -> None:
        """Ask `reader` too, at each scrape."""
        self._readers.append(reader)

    def remove(self, name: str, *values: str) -> None:
        """Stop showing a series. Does nothing if there is none."""
        self._cells[name].pop(values, None)

    def forget_replica(self, replica: str) -> None:
        """Stop showing all series of a replica. O(series)."""
        for declared in _OF_REPLICAS:
            at, cells = declared.labels.index("replica"), self._cells[declared.name]
            self._cells[declared.name] = {values: cell for values, cell in cells.items() if values[at] != replica}

    def keep_counts(self, replica: str) -> None:
        """Count what a replica did as done by a replica without a name, so that no sum over replicas shrinks."""
        for declared in _OF_REPLICAS:
            if declared.kind is not Kind.GAUGE:
                at = declared.labels.index("replica")
                own = [(values, cell) for values, cell in self._cells[declared.name].items() if values[at] == replica]
                for values, cell in own:
                    add(self.cell(declared.name, *values[:at], "", *values[at + 1 :]), cell)

    def keep(self, state: Iterable[Reading]) -> None:
        """Add the counts of a process that has ended, but not its gauges, which no longer hold."""
        for name, values, cell in state:
            if BY_NAME[name].kind is not Kind.GAUGE:
                add(self.cell(name, *values), cell)

    def state(self) -> list[Reading]:
        """Return all numbers now, those of the readers too. O(series)."""
        own = [(name, values, list(cell)) for name, cells in self._cells.items() for values, cell in cells.items()]
        return own + [reading for reader in self._readers for reading in reader()]


def is_of_table(reading: Reading) -> bool:
    """Return whether the table declares this metric, with as many labels and numbers as the reading has.

    >>> is_of_table(("preble_retries_denied_total", (), [1.0])), is_of_table(("preble_retries_denied_total", (), []))
    (True, False)
    """
    name, values, cell = reading
    declared = BY_NAME.get(name)
    return declared is not None and (len(values), len(cell)) == (len(declared.labels), declared.cell_size)


def note(cell: Cell, bounds: tuple[float, ...], value: float) -> None:
    """Count a value in a histogram's cell. O(log buckets).

    >>> cell = [0.0] * 4
    >>> note(cell, (1.0, 2.0), 2.0)
    >>> cell
    [0.0, 1.0, 0.0, 2.0]
    """
    cell[bisect_left(bounds, value)] += 1.0
    cell[-1] += value


def total(states: Iterable[Iterable[Reading]]) -> Totals:
    """Return the sums over processes. A metric without labels that nobody has counted is there, as 0."""
    sums: Totals = {declared.name: {} for declared in TABLE}
    for state in states:
        for name, values, cell in state:
            cells = sums[name]
            if values in cells:
                add(cells[values], cell)
            else:
                cells[values] = list(cell)
    for declared in TABLE:
        if not declared.labels:
            sums[declared.name].setdefault((), [0.0] * declared.cell_size)
    return sums


def add(cell: Cell, other: Cell) -> None:
    """Add the numbers of another series to those of one."""
    for i, value in enumerate(other):
        cell[i] += value
