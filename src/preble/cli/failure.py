"""From an error to one line on stderr and an exit status."""

from __future__ import annotations

from typing import IO, Any

import click

from preble.errors import ConfigError, PrebleError, TraceFormatError

USAGE_STATUS = 2
FAILURE_STATUS = 1


class Failure(click.ClickException):
    """A failure that the user can understand; shown as `preble: MESSAGE`."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"preble: {self.format_message()}", file=file, err=file is None)


def as_click_exception(error: BaseException) -> Failure | None:
    """The failure to show for `error`; None where `error` is a bug that has to be seen whole.

    A group (from an asyncio.TaskGroup) counts if everything in it was raised on purpose; its first error is shown.
    """
    if isinstance(error, BaseExceptionGroup):
        members = [as_click_exception(member) for member in error.exceptions]
        return None if None in members else members[0]
    if isinstance(error, PrebleError):
        is_usage = isinstance(error, ConfigError | TraceFormatError)
        return Failure(str(error), USAGE_STATUS if is_usage else FAILURE_STATUS)
    return None
