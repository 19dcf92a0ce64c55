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
from typing import Any, NamedTuple

import click

from preble import __version__
from preble.cli.failure import one_line_failures

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a disk without room answers, also to who writes to stdout."""


class Listed(NamedTuple):
    """A command as its group's help lists it. `module`: has it as `command`."""

    module: str
    help: str


COMMANDS = MappingProxyType(
    {
        "serve": Listed("preble.cli.serve", "The gateway: one OpenAI-compatible endpoint in front of your replicas."),
        "epp": Listed("preble.cli.epp", "The endpoint picker: a Kubernetes gateway carries the bytes, Preble chooses."),
        "select": Listed("preble.cli.select", "The selection service: your program carries the bytes, Preble chooses."),
        "up": Listed("preble.cli.up", "Replicas and gateway on this machine, all at once."),
        "emulate": Listed("preble.cli.emulate", "An emulated replica: vLLM's API and timing, no model and no GPU."),
        "ready": Listed("preble.cli.ready", "Does a gateway, picker or replica take requests?"),
        "explain": Listed("preble.cli.explain", "Why a request was sent where it was."),
        "check": Listed("preble.cli.check", "Do the replicas' token ids and caches agree with the gateway's?"),
        "replay": Listed("preble.cli.replay", "A decision log, played again, or put to another policy."),
        "bench": Listed("preble.cli.bench", "Send a workload to an endpoint and measure it."),
        "profile": Listed("preble.cli.profile", "Measure a replica and write its cost profile."),
        "simulate": Listed("preble.cli.simulate", "A whole cluster without GPUs, faster than real time."),
        "compare": Listed("preble.cli.compare", "Which policy carries most? Many simulations, one ranking."),
        "workload": Listed("preble.cli.workload", "Make workloads; study what they and traces are like."),
        "demo": Listed("preble.cli.demo", "Round robin against the default policy, on replicas of its own."),
    }
)


class LazyGroup(click.Group):
    """A group that imports a command's module on use, and reports a failure in one line.

    `listed`: the commands by name, in the order of the help.
    """

    def __init__(self, *args: Any, listed: Mapping[str, Listed], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._listed = listed

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._listed)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._listed:
            return None
        module, short_help = self._listed[cmd_name]
        command: click.Command = import_module(module).command
        command.short_help = short_help
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, and import none of them: that takes ten times as long as all the rest."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.help) for name, one in self._listed.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        close = ["--version"] if args[0] == "version" else get_close_matches(args[0], self._listed, n=1)
        if args[0] not in self._listed and close:
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
        from preble.build import commit  # only here: it can ask git

        click.echo(f"preble, version {__version__} (commit {commit()})")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    listed=COMMANDS,
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
        if isinstance(bug, OSError) and bug.errno in _FULL:
            click.echo(f"preble: cannot write: {bug.strerror}", err=True)
            sys.exit(1)
        click.echo(
            f"preble: internal error, {type(bug).__name__}: {bug}\n"
            "This is a bug in Preble. Run it again with PREBLE_TRACEBACK=1 and report the output.",
            err=True,
        )
        sys.exit(1)
