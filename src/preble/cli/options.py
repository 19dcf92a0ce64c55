"""Option types and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def workload_options(default_requests: int) -> Callable[[Command], Command]:
    """What is asked and when. `default_requests`: how many of a named workload, which has no end of its own."""
    options = (
        click.option(
            "--workload",
            default="tool_use",
            show_default=True,
            metavar="NAME|FILE",
            help="tool_use, or a trace file (docs/reference/trace-format.md).",
        ),
        click.option(
            "--rps", type=POSITIVE_FLOAT, help="Requests a second on average.  [default: the trace's own times]"
        ),
        click.option(
            "--seed", type=int, default=0, show_default=True, help="Same seed, same requests at the same times."
        ),
        workload_shape_options(default_requests),
    )
    return _all_of(options)


def workload_shape_options(default_requests: int) -> Callable[[Command], Command]:
    """What is asked, but for the workload itself, its rate and its seed, of which a command may take several."""
    options = (
        click.option(
            "--requests",
            type=POSITIVE,
            help=f"How many to send.  [default: all of a trace, {default_requests} else]",
        ),
        click.option(
            "--arrivals",
            type=click.Choice(("poisson", "gamma", "uniform", "burst")),
            default="poisson",
            show_default=True,
            help="How requests are spread over time; burst sends all at once.",
        ),
        click.option("--cv", type=POSITIVE_FLOAT, default=1.0, show_default=True, help="Burstiness of gamma arrivals."),
        click.option(
            "--zipf",
            type=click.FloatRange(min=0),
            default=1.1,
            show_default=True,
            help="Popularity skew of a named workload.",
        ),
        click.option(
            "--prefixes",
            "num_prefixes",
            type=POSITIVE,
            default=64,
            show_default=True,
            help="How many different tools (or the like) a named workload has.",
        ),
    )

    return _all_of(options)


def _all_of(options: Sequence[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add
