"""Where commands put their results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from preble.errors import ConfigError

STDOUT = Path("-")
_NO_NAME = "--"
"""In place of the file where an option that wants one is given without."""

Command = TypeVar("Command", bound=Callable[..., Any])


class OutputFile(click.Path):
    """A file that the command will write. That it cannot be is told before any work is done for it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if value == _NO_NAME:
            self.fail("it takes a file, or - for stdout", param, ctx)
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


def json_option(what: str) -> Callable[[Command], Command]:
    """`--json FILE`, given to the command as `json_file`: the same in every command, so that it need not be looked up.

    `what`: is written there; where that is stdout, the command prints nothing else on it.
    """
    return click.option(
        "--json",
        "json_file",
        type=OUTPUT_FILE,
        is_flag=False,
        flag_value=_NO_NAME,
        metavar="FILE",
        help=f"Write {what} as JSON; - for stdout, in place of the text.",
    )


def write_json(file: Path | None, result: Any) -> None:
    """What `json_option` promises. Raises: ConfigError: it cannot be written."""
    import msgspec

    if file is not None:
        write_result(file, msgspec.json.encode(result))


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
