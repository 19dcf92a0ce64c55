"""The command-line reference page, made from what `--help` says: `python -m preble.cli.reference FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from preble.cli import COMMANDS, cli

WIDTH = 100
HEAD = """\
# Command line

Made from `--help` by `make reference`; a test holds it to that.
"""


def command_reference() -> str:
    """The page: the help of the group, then of every command that is not hidden."""
    settings = {**cli.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    group = click.Context(cli, info_name="preble", **settings)
    parts = [HEAD, _section("preble", cli.get_help(group))]
    for name in COMMANDS:
        command = cli.get_command(group, name)
        if command is not None and not command.hidden:
            context = click.Context(command, parent=group, info_name=name)
            parts.append(_section(f"preble {name}", command.get_help(context)))
    return "\n".join(parts)


def _section(title: str, text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return f"## {title}\n\n```text\n{lines}\n```\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(command_reference(), encoding="utf-8")
