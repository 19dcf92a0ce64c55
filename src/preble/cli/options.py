"""Option types and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from preble.cli.logs import FORMATS, LEVELS
from preble.errors import ConfigError
from preble.web.urls import server_url

Command = TypeVar("Command", bound=Callable[..., Any])


class HttpUrl(click.ParamType[str]):
    """An http or https URL of a server; given back without `/v1` or a slash at the end."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return server_url(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class PolicyName(click.ParamType[str]):
    """One of the policies, which are asked for when they are needed: the module that knows them loads numpy."""

    name = "policy"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return f"[{'|'.join(self._names())}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self._names():
            self.fail(f"{value!r} is not one of {', '.join(self._names())}", param, ctx)
        return str(value)

    def _names(self) -> tuple[str, ...]:
        from preble.core.policies import policy_names

        return policy_names()


PORT = click.IntRange(0, 65535)
POSITIVE = click.IntRange(min=1)
POSITIVE_FLOAT = click.FloatRange(min=0, min_open=True)


def policy_option(default: str | None) -> Callable[[Command], Command]:
    """`--policy`. `default`: None where the configuration file may say it."""
    return click.option(
        "--policy",
        type=PolicyName(),
        default=default,
        help="How a replica is chosen." + ("" if default else "  [default: e2]"),
        show_default=default is not None,
    )


def log_options(command: Command) -> Command:
    """`--log-level` and `--log-format`, given to the command as `log_level` and `log_format`."""
    for option in (
        click.option(
            "--log-format",
            type=click.Choice(FORMATS),
            default="console",
            show_default=True,
            help="console for people, json for programs; both on stderr.",
        ),
        click.option(
            "--log-level",
            type=click.Choice(LEVELS),
            default="info",
            show_default=True,
            help="The least that is logged.",
        ),
    ):
        command = option(command)
    return command
