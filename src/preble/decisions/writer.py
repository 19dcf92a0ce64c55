"""The decision log's file, written by a thread of its own: what is logged is queued, and the caller goes on.

Nothing here can hold up or end the serving. Where the queue is full or the disk takes no more, lines are dropped and
counted, and the log says how many are missing where they are missing. (A simulation, which has time, can wait for the
queue.) A file never ends in half a line of ours: what a failed write has left is cut off again.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import msgspec
import structlog

from preble.core.types.events import (
    NotPlaced,
    PeerHeld,
    PeerPlaced,
    PeerReported,
    RequestPlaced,
    SchedulerEvent,
    Stored,
)
from preble.decisions.lines import DroppedLine, FullLine, Header, Line, line_of
from preble.decisions.names import LogNames
from preble.errors import ConfigError

MiB = 1024 * 1024
MAX_PENDING_BYTES = 64 * MiB
"""Prompts and the like that may wait to be written; they are shared with whoever else holds them, not copied."""
MAX_BATCH = 256
"""Lines written at once."""
CLOSE_S = 5.0
"""How long `close` waits for a slow disk."""
WARN_S = 60.0
"""Between two warnings for the same cause that the file takes no more."""
ENTRY_BYTES = 256
"""Counted for each waiting line beside its prompt."""


class LogSink(Protocol):
    """Where the bytes go."""

    def is_empty(self) -> bool:
        """Return whether nothing is there yet. Raises: OSError: what was there is gone, and nothing takes its place."""
        ...

    def append(self, data: bytes) -> None:
        """Write all of it, or nothing. Raises: OSError."""
        ...

    def close(self) -> None: ...


class LogFile:
    """A new file that only its owner may read (0600). What is there under this name is kept as NAME.1.

    Raises: ConfigError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        try:
            self._fd = _made(path)
        except OSError as error:
            raise ConfigError(f"decision log {str(path)!r} cannot be written: {error.strerror or error}") from error

    def is_empty(self) -> bool:
        """Return whether nothing is in it yet. One that was deleted is made anew. Raises: OSError: that fails."""
        there = os.fstat(self._fd)
        if not there.st_nlink:
            anew = _made(self._path)
            os.close(self._fd)
            self._fd, self._size = anew, 0
        elif there.st_size < self._size:  # somebody has cut it, as logrotate does with `copytruncate`
            os.ftruncate(self._fd, 0)
            self._size = 0
        return not self._size

    def append(self, data: bytes) -> None:
        """Write all of it, or nothing. Raises: OSError."""
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.pwrite(self._fd, rest, self._size + len(data) - len(rest)) :]
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        os.close(self._fd)


def _made(path: Path) -> int:
    """Return the descriptor of a new file. Raises: OSError."""
    if path.exists():
        if not path.is_file():
            raise FileExistsError(errno.EEXIST, "it is no file; name one, new or of an earlier run")
        path.replace(path.with_name(path.name + ".1"))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


class LogWriter:
    """Writes one log. `write` and `close` belong to one thread, the scheduler's; neither raises.

    `max_bytes`: size at which the log ends, since a disk is not for logs alone. `waits`: where the queue is full,
    `write` waits for room in it.
    """

    def __init__(
        self, sink: LogSink, header: Header, names: LogNames, *, max_bytes: int = 1024 * MiB, waits: bool = False
    ) -> None:
        self._sink = sink
        self._names = names
        self._max_bytes = max_bytes
        self._encode = msgspec.json.Encoder().encode
        self._log = structlog.get_logger("preble.decisions")
        self._queue: SimpleQueue[_Entry | None] = SimpleQueue()
        self._waits = waits
        self._progress = threading.Event()
        self._closed = False
        # Each of these is written by one thread only, so that no lock is needed.
        self._put_bytes = self._num_refused = self._unsaid_refused = 0
        self._done_bytes = self._num_written = self._num_lost = self._unsaid_lost = 0
        self._size = 0
        self._is_full = self._is_failing = False
        self._warned, self._warns_from = "", 0.0
        self._header = self._encoded(header)
        self._append([])
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    @property
    def num_written(self) -> int:
        """Lines in the file, without those about the log itself."""
        return self._num_written

    @property
    def num_dropped(self) -> int:
        """Lines that are not in the file and never will be."""
        return self._num_refused + self._num_lost

    def write(self, event: SchedulerEvent, now: float, *, size: int = 0) -> None:
        """Have the line of an event written, soon. O(1), unless it waits for room. `size`: bytes of prompts in it."""
        while self._waits and self._is_queue_full:
            self._progress.wait()
            self._progress.clear()
        if self._closed or self._is_queue_full:
            self._num_refused += 1
            self._unsaid_refused += 1
            return
        self._put_bytes += size + ENTRY_BYTES
        self._queue.put(_Entry(event, now, size + ENTRY_BYTES, self._unsaid_refused))
        self._unsaid_refused = 0

    @property
    def _is_queue_full(self) -> bool:
        return self._put_bytes - self._done_bytes > MAX_PENDING_BYTES

    def close(self, timeout_s: float | None = CLOSE_S) -> None:
        """Write what is queued, and close the file. Blocks for `timeout_s` at most; None: until it is done."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join(timeout_s)
            self._log.info("decision_log_closed", lines=self._num_written, dropped=self.num_dropped)

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch, is_open = self._next_batch()
            self._append([line for entry in batch for line in self._lines(entry)], len(batch))
            self._done_bytes += sum(entry.size for entry in batch)
            self._progress.set()
        try:
            self._sink.close()
        except OSError as error:  # a disk may say only now that it is full
            self._failed(error)

    def _next_batch(self) -> tuple[list[_Entry], bool]:
        """Return what waits, at least one entry unless the end is reached; and whether more may come."""
        batch: list[_Entry] = []
        while not batch or (len(batch) < MAX_BATCH and not self._queue.empty()):
            entry = self._queue.get()
            if entry is None:
                return batch, False
            batch.append(entry)
        return batch, True

    def _lines(self, entry: _Entry) -> list[bytes]:
        lines = [self._encoded(DroppedLine(count=entry.refused_before))] if entry.refused_before else []
        try:
            lines.append(self._encoded(line_of(self._names, entry.now, entry.event)))
        except Exception:  # noqa: BLE001 (the thread's root: a value that cannot be written must not end the log)
            self._log.exception("decision_log_line_failed")
            lines.append(self._encoded(DroppedLine(count=1)))
        return lines

    def _encoded(self, line: Line) -> bytes:
        return self._encode(line) + b"\n"

    def _append(self, lines: list[bytes], num_entries: int = 0) -> None:
        """Append lines for `num_entries` entries; if that fails, they count as lost."""
        if self._is_full or not self._try_append(lines):
            self._num_lost += num_entries
            self._unsaid_lost += num_entries
            return
        self._num_written += num_entries
        self._unsaid_lost = 0

    def _try_append(self, lines: list[bytes]) -> bool:
        try:
            if is_new := self._sink.is_empty():  # of the file before, if one was deleted, nothing is here
                self._size, self._unsaid_lost = 0, self._num_written + self._num_lost
                if self._num_written and not self._is_failing:
                    self._failed(FileNotFoundError(errno.ENOENT, "its file was deleted or cut"))
            gap = [self._encoded(DroppedLine(count=self._unsaid_lost))] if self._unsaid_lost else []
            data = b"".join([*([self._header] if is_new else []), *gap, *lines])
            if self._size + len(data) > self._max_bytes:
                self._is_full = True
                self._log.warning("decision_log_full", bytes=self._size, consequence="decisions are no longer logged")
                self._sink.append(self._encoded(FullLine()))
                return False
            self._sink.append(data)
        except OSError as error:
            self._failed(error)
            return False
        self._size += len(data)
        self._is_failing = False
        return True

    def _failed(self, error: OSError) -> None:
        """Warn of each new cause, but not at each write where some that are small still fit."""
        now, cause = time.monotonic(), str(error)
        if cause != self._warned or (not self._is_failing and now >= self._warns_from):
            self._warned, self._warns_from = cause, now + WARN_S
            self._log.warning("decision_log_failed", error=cause, consequence="decisions are dropped from it")
        self._is_failing = True


@dataclass(slots=True)
class _Entry:
    """One line to be made and written. `refused_before`: lines that found no room in the queue just before it."""

    event: SchedulerEvent
    now: float
    size: int
    refused_before: int


class DecisionRecorder:
    """Writes every call that changes a scheduler into the log, in order. See `SchedulerListener`.

    Give it to the scheduler's `listen` before the first call; otherwise the log cannot be replayed.
    """

    def __init__(self, log: LogWriter) -> None:
        self._log = log

    def on(self, event: SchedulerEvent, now: float) -> None:
        self._log.write(event, now, size=_num_token_bytes(event))


def _num_token_bytes(event: SchedulerEvent) -> int:
    match event:
        case RequestPlaced(request) | NotPlaced(request):
            return len(request.prompt)
        case Stored(stored):
            return len(stored.tokens)
        case PeerReported(fact=PeerPlaced(prompt=bytes(prompt))) | PeerHeld(prompt=prompt):
            return len(prompt)
    return 0
