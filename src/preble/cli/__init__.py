"""The command `preble`: one module per command, imported when the command is used.

Results go to stdout, messages to stderr. Exit status: 0 done, 1 failed, 2 a wrong flag, file or URL, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Any

import click

from preble import __version__
from preble.build import commit
from preble.cli.failure import one_line_failures

COMMANDS = MappingProxyType(
    {
        "serve": "preble.cli.serve",
        "epp": "preble.cli.epp",
        "select": "preble.cli.select",
        "up": "preble.cli.up",
        "emulate": "preble.cli.emulate",
        "ready": "preble.cli.ready",
        "explain": "preble.cli.explain",
        "check": "preble.cli.check",
        "replay": "preble.cli.replay",
        "bench": "preble.cli.bench",
        "profile": "preble.cli.profile",
        "simulate": "preble.cli.simulate",
        "compare": "preble.cli.compare",
        "workload": "preble.cli.workload",
        "demo": "preble.cli.demo",
    }
)


class LazyGroup(click.Group):
    """A group that imports a command's module on use, and reports a failure in one line.

    `modules`: command -> the module that has it as `command`, in the order of the help.
    """

    def __init__(self, *args: Any, modules: Mapping[str, str], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._modules:
            return None
        command: click.Command = import_module(self._modules[cmd_name]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        close = ["--version"] if args[0] == "version" else get_close_matches(args[0], self._modules, n=1)
        if args[0] not in self._modules and close:
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {close[0]!r}?", ctx)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with one_line_failures():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with one_line_failures():
            return super().invoke(ctx)


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"preble, version {__version__} (commit {commit()})")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    modules=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Every command explains itself: preble serve --help",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Preble: one endpoint in front of many LLM replicas. Each prompt goes where it is served soonest.

    \b
    Start with one of these:
      preble up --engine emulator --replicas 4      try it here, without a GPU
      preble serve --replica http://gpu1:8000 --replica http://gpu2:8000
    """


def main() -> None:
    """Run the command line and exit. A bug is reported in one line; `PREBLE_TRACEBACK=1` shows its traceback."""
    try:
        cli.main(prog_name="preble")
    except Exception as bug:
        if os.environ.get("PREBLE_TRACEBACK") or (isinstance(bug, OSError) and bug.errno == errno.EPIPE):
            raise
        click.echo(
            f"preble: internal error, {type(bug).__name__}: {bug}\n"
            "This is a bug in Preble. Run it again with PREBLE_TRACEBACK=1 and report the output.",
            err=True,
        )
        sys.exit(1)
