"""Option types and options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from preble.core.replica.waiting_queue import QueueOrder
from preble.errors import ConfigError
from preble.logs import FORMATS, LEVELS
from preble.web.urls import server_url

Command = TypeVar("Command", bound=Callable[..., Any])


class Read(click.ParamType[Any]):
    """A value that `read` makes of its text, or says what is wrong with it. `name`: what it is, for a ValueError."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value  # a default
        try:
            return self._read(value)
        except (ConfigError, click.BadParameter) as error:
            self.fail(str(error), param, ctx)
        except ValueError:
            self.fail(f"{value!r} is not {self.name}", param, ctx)


def _policy(name: str) -> str:
    """Return the name of a policy that exists. Policies are imported on use: they load numpy."""
    from preble.plugins.policies import make_policy

    make_policy(name)
    return name


def _replica(text: str) -> Any:
    """Return a replica by its URL, and what follows it as `,KEY=VALUE`."""
    from preble.config.load import replica_of

    return replica_of("--replica", text)


HTTP_URL = Read("url", server_url)
"""An http or https URL of a server; the value has no `/v1` or slash at its end."""
REPLICA = Read("url", _replica)
POLICY = Read("name", _policy)
"""A policy's name, or module:Class."""


class FiniteRange(click.FloatRange):
    """A number in a range, never "nan" or "inf"."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value!r} is not a number", param, ctx)


def option(
    names: str, text: str, kind: Any = None, *, default: Any = None, **rest: Any
) -> Callable[[Command], Command]:
    """Add an option. `names`: the flags, and the parameter's name where it is another. `text`: for the help, which also
    shows the default, unless `show_default` is False.
    """
    if default is not None:
        rest = {"default": default, "show_default": True, **rest}
    return click.option(*names.split(), type=kind, help=text, **rest)


def all_of(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Add options; the help shows them in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


import_policy_option = option(
    "--import-policy",
    "Import the policy that the log names as module:Class. Without this, such a log runs no code and is refused.",
    is_flag=True,
)
PORT = click.IntRange(0, 65535)
POSITIVE = click.IntRange(min=1)
POSITIVE_FLOAT = FiniteRange(min=0, min_open=True)
NOT_NEGATIVE_FLOAT = FiniteRange(min=0)


def policy_option(default: str | None) -> Callable[[Command], Command]:
    """Add `--policy`. `default`: None if the configuration file may set it."""
    return option(
        "--policy",
        "How to choose a replica: preble, e2 (the paper's), round_robin, least_load, or another of "
        "docs/reference/policies.md; or module:Class, your own." + ("" if default else "  [default: preble]"),
        POLICY,
        default=default,
    )


replica_options = all_of(
    option(
        "--replica replicas",
        "URL of a replica; `URL,role=prefill` and the like say more of it. Repeatable.",
        REPLICA,
        multiple=True,
    ),
    option(
        "--engine",
        "What the replicas run: vllm, sglang, openai, or your own adapter; auto asks each replica.  [default: auto]",
        metavar="NAME|MODULE:CLASS",
    ),
    policy_option(default=None),
    option(
        "--tokenizer",
        "The model's tokenizer: a folder, or a name on the Hugging Face hub.  [default: ask the replicas]",
        metavar="PATH|NAME",
    ),
    option("--profile", "Cost profile of the replicas' GPU and model, which policies compare by.", metavar="NAME|FILE"),
    option(
        "--peers peers__servers",
        "NATS server over which the gateways of this cluster tell each other what they place. Repeatable.",
        multiple=True,
        metavar="nats://HOST:PORT",
    ),
)
"""Which replicas there are, what they run, and how and with whom they are chosen."""
api_key_option = option(
    "--api-key", "Bearer token, if the server requires one.", envvar="PREBLE_API_KEY", show_envvar=True, metavar="KEY"
)
log_options = all_of(
    option("--log-level", "The least severe level to log.", click.Choice(LEVELS), default="info"),
    option(
        "--log-format",
        "console for people, json for programs; both on stderr. auto: console on a terminal, else json.",
        click.Choice(FORMATS),
        default="auto",
    ),
)
config_options = all_of(
    option(
        "--config config_path",
        "TOML file with every setting; flags and PREBLE_* variables override it. It is watched: replicas and most "
        "settings change while serving.",
        click.Path(path_type=Path, dir_okay=False),
    ),
    log_options,
)
"""Of commands that serve."""


def order_option(whose: str) -> Callable[[Command], Command]:
    """Add `--order`, the order in which a replica serves its waiting requests. `whose`: for the help."""
    return option("--order", whose, click.Choice([order.value for order in QueueOrder]), default=QueueOrder.FCFS.value)
