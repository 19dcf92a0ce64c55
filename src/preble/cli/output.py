"""Where commands put their results."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from preble.errors import ConfigError

STDOUT = Path("-")


class OutputFile(click.Path):
    """A file that the command will write. That it cannot be is told before any work is done for it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        file = Path(str(super().convert(value, param, ctx)))
        if file != STDOUT and not file.exists():
            self._check_folder(file, param, ctx)
        return file

    def _check_folder(self, file: Path, param: click.Parameter | None, ctx: click.Context | None) -> None:
        """The folder that is there already, below which the others will be made, must take them."""
        folder = next(above for above in file.absolute().parents if os.access(above, os.F_OK))
        if not folder.is_dir():
            self.fail(f"{str(file)!r} cannot be written: {folder} is no folder", param, ctx)
        if not os.access(folder, os.W_OK | os.X_OK):
            self.fail(f"{str(file)!r} cannot be written: {folder} takes no new files", param, ctx)


OUTPUT_FILE = OutputFile()


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Make the folder of `file`, which is written inside. Raises: ConfigError: it cannot be."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error


def write_result(file: Path, content: bytes) -> None:
    """Write a file, its folder too if it is not there; `-` is stdout.

    Raises: ConfigError: it cannot be written.
    """
    if file == STDOUT:
        click.echo(content)
        return
    with writing(file):
        file.write_bytes(content)
