"""Logging is configured here and nowhere else: structlog and the standard library's loggers, both to stderr.

A log can fail nobody: where stderr is full, closed, or not read, lines are dropped and counted, and the caller goes on.
"""

from __future__ import annotations

import io
import json
import logging
import os
import select
import stat
import sys
import threading
from datetime import UTC, datetime
from typing import TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "console", "json")
_ENCODER = msgspec.json.Encoder(enc_hook=repr)


class LogLosses:
    """How many lines a log has lost: stderr did not take them whole, or they could not be worded."""

    def __init__(self) -> None:
        self.num_lines = 0


class LossyStream(io.TextIOBase):
    """A stream that drops what `target` does not take at once. No method raises or blocks. One write is one line."""

    def __init__(self, target: TextIO, losses: LogLosses) -> None:
        self._target = target
        self._losses = losses
        self._is_cut = False
        self._lock = threading.Lock()  # threads log as well, and a long line goes out in several pieces
        try:
            self._fd: int | None = target.fileno()
        except (OSError, ValueError):  # a test's buffer
            self._fd = None
        self._is_file = self._fd is not None and _is_file(self._fd)

    def isatty(self) -> bool:
        try:
            return self._target.isatty()
        except (OSError, ValueError):
            return False

    def flush(self) -> None:
        """Do nothing: what was written is out, or dropped."""

    def write(self, text: str) -> int:
        """Write `text`, or as much of it as is taken; the next line then begins on a line of its own."""
        try:
            with self._lock:
                self._write(text)
        except (OSError, ValueError):
            self._losses.num_lines += 1
        return len(text)

    def _write(self, text: str) -> None:
        if self._fd is None:
            self._target.write(text)
            return
        rest = data = (b"\n" if self._is_cut else b"") + text.encode("utf-8", "backslashreplace")
        try:
            while rest:
                # A file never blocks, so it need not be asked.
                rest = rest[os.write(self._fd, rest) if self._is_file else _write_now(self._fd, rest) :]
        finally:
            if len(rest) < len(data):
                self._is_cut = bool(rest)


def _is_file(fd: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError:
        return False


def _write_now(fd: int, data: bytes) -> int:
    """Return how many bytes were taken. Raises: OSError: none."""
    if sys.platform == "win32":
        return os.write(fd, data)
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    [(_, events)] = poll.poll(0) or [(fd, 0)]
    if not events & select.POLLOUT:
        raise BlockingIOError
    # A pipe that is ready takes this much without blocking.
    return os.write(fd, data[: select.PIPE_BUF])


class _Lines:
    """Writes each line at once, whatever its level."""

    def __init__(self, stream: LossyStream) -> None:
        self._stream = stream

    def line(self, text: str) -> None:
        self._stream.write(text + "\n")

    debug = info = warning = error = critical = line


class _Guarded:
    """Processors in a row; an event that one of them cannot handle is dropped and counted."""

    def __init__(self, processors: list[Processor], losses: LogLosses) -> None:
        self._processors = processors
        self._losses = losses

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        value: EventDict = event
        try:
            for processor in self._processors:
                value = processor(logger, method, value)  # type: ignore[assignment]
        except structlog.DropEvent:
            raise
        except Exception as error:
            self._losses.num_lines += 1
            raise structlog.DropEvent from error
        return value


def configure_logging(level: str, log_format: str) -> LogLosses:
    """Send everything at or above `level` to stderr as `log_format`; replaces what was configured before.

    `auto`: for people (`console`) where stderr is a terminal, else for programs (`json`).
    Returns the count of lines that are lost from now on.
    """
    threshold = logging.getLevelNamesMapping()[level.upper()]
    losses = LogLosses()
    stream = LossyStream(sys.stderr, losses)
    log_format = log_format if log_format != "auto" else "console" if stream.isatty() else "json"
    renderers = _renderers(log_format, stream)
    structlog.configure(
        processors=[_Guarded([_completed, *renderers], losses)],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=lambda *_: _Lines(stream),
        cache_logger_on_first_use=True,
    )
    _configure_standard_library(threshold, renderers, stream)
    return losses


def _completed(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Add what every line has."""
    event["level"] = method
    event["timestamp"] = datetime.now(UTC)
    return structlog.processors.format_exc_info(logger, method, event) if "exc_info" in event else event


def _renderers(log_format: str, stream: LossyStream) -> list[Processor]:
    if log_format == "json":
        return [_as_json]
    console = structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback)
    return [_with_time_in_words, console]


def _with_time_in_words(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    event["timestamp"] = event["timestamp"].isoformat().replace("+00:00", "Z")
    return event


def _as_json(logger: WrappedLogger, method: str, event: EventDict) -> str:
    try:
        return _ENCODER.encode(event).decode()
    except UnicodeEncodeError:  # half of a surrogate pair, as in a client's path
        return json.dumps(_with_time_in_words(logger, method, event), default=repr)


def _configure_standard_library(threshold: int, renderers: list[Processor], stream: LossyStream) -> None:
    """Let libraries (aiohttp, nats) log in the same form. Starts and requests, which they log too, are ours."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
            foreign_pre_chain=[_completed],
        )
    )
    logging.basicConfig(level=threshold, handlers=[handler], force=True)
    for chatty in ("asyncio", "httpx2"):
        logging.getLogger(chatty).setLevel(max(threshold, logging.WARNING))
