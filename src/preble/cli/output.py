"""Where commands put their results."""

from __future__ import annotations

from pathlib import Path

import click

from preble.errors import ConfigError


def write_result(file: Path, content: bytes) -> None:
    """Write a file, its folder too if it is not there; `-` is stdout.

    Raises: ConfigError: it cannot be written.
    """
    if str(file) == "-":
        click.echo(content)
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error
