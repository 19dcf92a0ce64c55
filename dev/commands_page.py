"""Write the page of commands from their `--help`: `make reference`.

.venv/bin/python dev/commands_page.py    # docs/reference/cli.md
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from preble.cli import cli

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
WIDTH = 100
HEAD = """\
# Command line

Made from `--help` by `make reference`; a test compares the two.
"""


def command_reference() -> str:
    """Return the page: the help of the group, then of every command that is not hidden."""
    settings = {**cli.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    return "\n".join([HEAD, *_sections(cli, click.Context(cli, info_name="preble", **settings))])


def _sections(command: click.Command, context: click.Context) -> Iterator[str]:
    yield _section(context.command_path, command.get_help(context))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _sections(below, click.Context(below, parent=context, info_name=name))


def _section(title: str, text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return f"## {title}\n\n```text\n{lines}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(command_reference(), encoding="utf-8")
