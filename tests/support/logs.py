"""Decision logs made in tests."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import msgspec

from preble.core.costs.model import CostProfile
from preble.decisions.lines import Event, Header, header_line
from preble.decisions.names import LogNames
from preble.decisions.reader import LogReader
from preble.decisions.settings import SchedulerSettings, make_scheduler
from preble.decisions.writer import DecisionRecorder, LogWriter

PROFILE = CostProfile("unit", "made up", ((0, 0.0), (100, 0.1)), 0.0, 0.01, 0.001, 0.0, 64)


class MemorySink:
    """Keeps what is appended. `broken`: raises instead."""

    def __init__(self) -> None:
        self.data = io.BytesIO()
        self.broken = False
        self.is_closed = False

    def is_empty(self) -> bool:
        return not self.data.tell()

    def append(self, data: bytes) -> None:
        if self.broken:
            raise OSError(28, "No space left on device")
        self.data.write(data)

    def close(self) -> None:
        self.is_closed = True


class Recording:
    """A scheduler whose log ends up in memory."""

    def __init__(
        self, settings: SchedulerSettings, names: LogNames | None = None, profile: CostProfile = PROFILE
    ) -> None:
        self.sink = MemorySink()
        names = names or LogNames()
        self.log = LogWriter(self.sink, header_line(names, 0.0, 0.0, settings, profile), names)
        self.scheduler = make_scheduler(settings, profile)
        self.scheduler.listen(DecisionRecorder(self.log))

    def written_to(self, path: Path) -> Path:
        """End the log and write it to a file."""
        self.log.close(60.0)
        path.write_bytes(self.sink.data.getvalue())
        return path


def rewritten(path: Path, change: Callable[[Header | Event], Header | Event | None]) -> Path:
    """A log beside `path` with every line changed; None drops it."""
    log = LogReader(path)
    lines = [change(log.header), *(change(numbered.event) for numbered in log)]
    other = path.with_suffix(".changed.jsonl")
    other.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines if line is not None))
    return other
