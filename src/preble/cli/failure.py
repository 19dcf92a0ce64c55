"""Failures as one line on stderr and an exit status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click
from click.exceptions import Exit, NoArgsIsHelpError

from preble.errors import ConfigError, PrebleError, TraceFormatError

INTERRUPTED_STATUS = 130


class CommandFailure(click.ClickException):
    """A failure with a message for the user: `preble: MESSAGE`, exit status 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"preble: {self.format_message()}", file=file, err=file is None)


class UsageFailure(CommandFailure):
    """A wrong flag, file or URL: exit status 2."""

    exit_code = 2


@contextmanager
def one_line_failures() -> Iterator[None]:
    """Turn an intended error inside the block into one line and an exit status; a bug passes through."""
    try:
        yield
    except KeyboardInterrupt:
        raise Exit(INTERRUPTED_STATUS) from None
    except (PrebleError, click.UsageError, BaseExceptionGroup) as error:
        failure = as_click_exception(error)
        if failure is None:
            raise
        raise failure from error


def as_click_exception(error: BaseException) -> click.ClickException | None:
    """Return the failure to show for `error`; None if `error` is a bug, which needs its traceback.

    A group (from an asyncio.TaskGroup) counts if all its errors are intended; its first one is shown.
    """
    if isinstance(error, BaseExceptionGroup):
        members = [as_click_exception(member) for member in error.exceptions]
        return None if None in members else members[0]
    if isinstance(error, ConfigError | TraceFormatError):
        return UsageFailure(str(error))
    if isinstance(error, PrebleError):
        return CommandFailure(str(error))
    if isinstance(error, click.UsageError) and not isinstance(error, NoArgsIsHelpError):
        return UsageFailure(_with_hint(error))
    return None


def _with_hint(error: click.UsageError) -> str:
    message = error.format_message()
    return f"{message} (help: {error.ctx.command_path} --help)" if error.ctx else message
