"""What the scheduler has learned, in a small file: the next start begins with it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import structlog

from preble import background
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import NOTHING_LEARNED, Learned
from preble.errors import ConfigError

WRITTEN_EVERY_S = 60.0
MOST_BYTES = 4 * 2**20
"""Several times what the most lengths take. A larger file is not ours."""
LARGEST_NUMBER = 1e9
VERSION = 1


class _Contents(msgspec.Struct, frozen=True):
    version: int
    profile: str
    learned: Learned


class LearnedFile:
    """Reads the file once, and writes it from then on. `profile`: the name of the one that the factors belong to."""

    def __init__(self, path: Path, profile: str) -> None:
        self._path = path
        self._profile = profile
        self._scheduler: GlobalScheduler | None = None
        self._writing: asyncio.Task[None] | None = None

    def read(self) -> Learned:
        """Return what the file says; nothing where there is none yet. One that cannot be used is said in the log.

        Raises: ConfigError: no file can be written there.
        """
        folder = self._path.parent
        if self._path.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(
                f"scheduler.learned_file {str(self._path)!r} cannot be written; name a file in a folder of yours"
            )
        try:
            with self._path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES} bytes")
            contents = msgspec.json.decode(data, type=_Contents)
            _check_numbers(contents.learned)
            if contents.version != VERSION:
                raise ValueError(f"its version is {contents.version}, this Preble reads {VERSION}")
        except FileNotFoundError:
            return NOTHING_LEARNED
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            structlog.get_logger().warning("learned_file_ignored", path=str(self._path), error=str(error))
            return NOTHING_LEARNED
        learned = contents.learned
        structlog.get_logger().info("learned_file_read", path=str(self._path), lengths=len(learned.lengths))
        if contents.profile != self._profile:
            return Learned(answer_tokens=learned.answer_tokens, lengths=learned.lengths)
        return learned

    def keep(self, scheduler: GlobalScheduler) -> None:
        """Write what `scheduler` has learned, every `WRITTEN_EVERY_S` and at the end. Call it in the event loop."""
        self._scheduler = scheduler
        self._writing = background.keep(self._write_often, "learned_file")

    async def close(self) -> None:
        """Write it for the last time."""
        if self._writing is not None:
            await background.end(self._writing)
            await self._write()

    async def _write_often(self) -> None:
        while True:
            await asyncio.sleep(WRITTEN_EVERY_S)
            await self._write()

    async def _write(self) -> None:
        assert self._scheduler is not None
        contents = _Contents(VERSION, self._profile, self._scheduler.learned())
        try:
            await asyncio.to_thread(self._replace, msgspec.json.encode(contents))
        except OSError as error:
            structlog.get_logger().error("learned_file_not_written", path=str(self._path), error=str(error))

    def _replace(self, data: bytes) -> None:
        """Write the whole file or nothing: a reader finds the old one or the new one. Only its owner may read it."""
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(data)
            beside.replace(self._path)
        finally:
            beside.unlink(missing_ok=True)


def _check_numbers(learned: Learned) -> None:
    """Raises: ValueError: no scheduler can have learned that."""
    numbers = [learned.prefill_factor, learned.decode_factor, learned.answer_tokens or 0.0]
    for length in learned.lengths:
        numbers += (length.answers, length.output_tokens)
    if not all(0.0 <= number <= LARGEST_NUMBER for number in numbers):
        raise ValueError(f"a number in it is not within 0 ... {LARGEST_NUMBER:,.0f}")
