"""Output files of commands."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

import click

from preble.errors import ConfigError

STDOUT = Path("-")
_NO_NAME = "--"
"""Stands for the file if the option is given without one."""
_PROBE = bytes(4096)
"""Written where a result will lie, and removed at once, to see whether there is room."""

Command = TypeVar("Command", bound=Callable[..., Any])


class OutputFile(click.Path):
    """A file that the command will write. The command fails before any work if it cannot. `is_drawn`: by matplotlib."""

    def __init__(self, *, is_drawn: bool = False) -> None:
        super().__init__(dir_okay=False, writable=True)
        self._is_drawn = is_drawn

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if value == _NO_NAME:
            self.fail("it takes a file, or - for stdout", param, ctx)
        if self._is_drawn:
            from preble.lab.report import require_matplotlib

            require_matplotlib()
        file = Path(str(super().convert(value, param, ctx)))
        if file != STDOUT and not file.exists():
            self._check_folder(file, param, ctx)
        return file

    def _check_folder(self, file: Path, param: click.Parameter | None, ctx: click.Context | None) -> None:
        """Check that its folder is there and writable: one that is made silently hides a typo."""
        folder = file.absolute().parent
        if not os.access(folder, os.F_OK):
            self.fail(f"{str(file)!r} cannot be written: there is no folder {folder}; make it first", param, ctx)
        if not folder.is_dir():
            self.fail(f"{str(file)!r} cannot be written: {folder} is no folder", param, ctx)
        try:
            with TemporaryFile(dir=folder) as probe:  # a folder without rights, a read-only disk, or one that is full
                probe.write(_PROBE)
        except OSError as error:
            self.fail(f"{str(file)!r} cannot be written: {folder} takes no file: {error.strerror}", param, ctx)


OUTPUT_FILE, DRAWN_FILE = OutputFile(), OutputFile(is_drawn=True)


def json_option(what: str) -> Callable[[Command], Command]:
    """Add `--json FILE`, which the command gets as `json_file`: the same option in every command.

    `what` is written there. If that is stdout, the command prints nothing else on it.
    """
    return click.option(
        "--json",
        "json_file",
        type=OUTPUT_FILE,
        is_flag=False,
        flag_value=_NO_NAME,
        metavar="FILE",
        help=f"Write {what} as JSON; - for stdout, instead of the text.",
    )


def write_json(file: Path | None, result: Any) -> bool:
    """Write the value of `json_option`; return whether stdout is left for text. Raises: ConfigError: it cannot be
    written.
    """
    import msgspec

    if file is not None:
        write_result(file, msgspec.json.encode(result))
    return file != STDOUT


def made_by() -> str:
    """Return the foot of a page: the date, and the command that made the page."""
    return f"Made on {datetime.now().astimezone():%Y-%m-%d %H:%M %Z} by: {shlex.join(['preble', *sys.argv[1:]])}"


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Let the block write `file`. Raises: ConfigError: it cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error


def write_result(file: Path, content: bytes) -> None:
    """Write a file; `-` is stdout. What the file does not take goes to stdout, too: hours of work may be in it.

    Raises: ConfigError: it cannot be written.
    """
    if file == STDOUT:
        click.echo(content)
        return
    try:
        with writing(file):
            file.write_bytes(content)
    except ConfigError as error:
        click.echo(content)
        raise ConfigError(f"{error}; it is on stdout instead") from error
