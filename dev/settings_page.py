"""Write the page of settings from what the sections of the configuration say of them: `make reference`.

.venv/bin/python dev/settings_page.py    # docs/reference/configuration.md
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple, get_type_hints

import msgspec
from msgspec import Struct

from preble.config import GatewayConfig, GroupConfig, Knob, ReplicaConfig, TargetsConfig, knobs
from preble.config.reloading import is_changeable
from preble.core.policies.registry import policy_names

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "configuration.md"
_ABOUT = re.compile(r"(?:\[(?P<unit>[^],]*?)(?:, )?(?P<expert>expert)?\] )?(?P<text>.*) Why: (?P<why>.*)\.")
_HEAD = """\
# Configuration of the gateway

<!-- Made by `make reference`; a test compares. To edit: src/preble/config/ -->

One TOML file (`preble serve --config FILE`), then environment variables, then flags; the later one wins. An unknown key
is an error that names the nearest known one. In the environment `limits.max_in_flight` is
`PREBLE_LIMITS__MAX_IN_FLIGHT`, and a list is separated by commas. Expert settings, which
hardly anybody has to change, are folded.

```toml
replicas = ["http://10.0.0.1:8000", { url = "http://10.0.0.2:8000", engine = "openai" }]
policy = "preble"
tokenizer = "Qwen/Qwen3-8B"

[limits]
max_in_flight = 1024
```

```sh
PREBLE_REPLICAS=http://10.0.0.1:8000,http://10.0.0.2:8000 PREBLE_LIMITS__MAX_IN_FLIGHT=1024 preble serve
```
"""
_WHILE_SERVING = """\
## While serving

A reload, by SIGHUP or because the file has changed, changes {0}.

These count only after a restart: {1}.

If a reload changes one of these, the log names it (`restart_needed`), and the old value counts until the gateway is
started again.
"""
_TABLE = "| key | default | unit | meaning | why this default |\n|---|---|---|---|---|"


class About(NamedTuple):
    """What the text below a field says. `unit`: "" for none. `why`: it has the default that it has."""

    unit: str
    text: str
    why: str
    is_expert: bool


def settings_page() -> str:
    """Return the page in Markdown. Pure; the same text for the same code."""
    parts = [_HEAD]
    by_section: dict[str, list[Knob]] = {}
    for knob in knobs(GatewayConfig):
        by_section.setdefault(knob.key.rpartition(".")[0], []).append(knob)
    for section, members in by_section.items():
        title = f"`[{section}]`\n\n{_meaning(section)}" if section else "Top level"
        parts.append(f"## {title}\n\n{_tables(members)}")
    tables = (
        ("A replica's table in `replicas`", ReplicaConfig),
        ("A table in `groups`", GroupConfig),
        ("A table in `models`", TargetsConfig),
    )
    for title, struct in tables:
        parts.append(f"## {title}\n\n{_tables(list(knobs(struct)))}")
    parts.append(_WHILE_SERVING.format(*_by_reload()))
    return "\n".join(parts)


def about(knob: Knob) -> About:
    """Return what its section says of it. Reads the section's source."""
    return _abouts(knob.section)[knob.key.rpartition(".")[2]]


@cache
def _abouts(section: type[Struct]) -> Mapping[str, About]:
    """Return what a section says of each of its fields."""
    [definition] = ast.parse(inspect.getsource(section)).body
    found = {}
    for field, below in pairwise(definition.body):  # type: ignore[attr-defined]
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            text = " ".join(ast.literal_eval(below.value).split())
            if (match := _ABOUT.fullmatch(text)) is None:
                raise ValueError(f"{section.__name__}.{ast.unparse(field.target)}: {text!r} does not say why")
            unit, expert, meaning, why = match.groups()
            found[ast.unparse(field.target)] = About(unit or "", meaning, why, expert is not None)
    return found


def _by_reload() -> list[str]:
    """Return the settings that a reload changes, and the others. A section stands for all its settings."""
    keys = [knob.key for knob in knobs(GatewayConfig)]
    lists: dict[bool, list[str]] = {True: [], False: []}
    for key in keys:
        section = key.rpartition(".")[0]
        whole = {is_changeable(other) for other in keys if other.rpartition(".")[0] == section}
        name = section if section and len(whole) == 1 else key
        if name not in lists[is_changeable(key)]:
            lists[is_changeable(key)].append(name)
    return [", ".join(f"`{name}`" for name in lists[changes]) for changes in (True, False)]


def _meaning(section: str) -> str:
    """Return what the section's class says of itself, in one paragraph."""
    return " ".join((get_type_hints(GatewayConfig)[section].__doc__ or "").split())


def _tables(members: Sequence[Knob]) -> str:
    """Return the table of a section; its expert settings follow in a folded one."""
    usual = [_row(knob) for knob in members if not about(knob).is_expert]
    expert = [_row(knob) for knob in members if about(knob).is_expert]
    shown = "\n".join([_TABLE, *usual, ""]) if usual else ""
    folded = indent("\n".join([_TABLE, *expert, ""]), " " * 4)
    return shown + ("\n" if usual and expert else "") + (f'??? note "Expert settings"\n\n{folded}' if expert else "")


def _row(knob: Knob) -> str:
    said, policies = about(knob), ", ".join(f"`{name}`" for name in policy_names())
    text = said.text.replace("{policies}", policies)
    return f"| `{knob.key}` | {_shown(knob.default)} | {said.unit} | {text} | {said.why} |"


def _shown(default: Any) -> str:
    if default is msgspec.NODEFAULT:
        return "required"
    if default is None or default == ():
        return "none"
    if isinstance(default, tuple):
        return f"`{json.dumps(default)}`"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    PAGE.write_text(settings_page(), encoding="utf-8")
