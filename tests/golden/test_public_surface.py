"""Everything that docs/reference/what-stays.md promises, kept as a file, a line each: it changes only on purpose.

`make golden` writes the file. A line that is new there is a new promise; one that is gone or different breaks one, and
needs a deprecation first.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import click
import msgspec
import pytest

import preble
import preble.engines
from preble.cli import cli
from preble.config import GatewayConfig, GroupConfig, ReplicaConfig
from preble.config.knobs import knobs
from preble.decisions import lines
from preble.engines import registry
from preble.gateway.pages.table import PATHS
from preble.lab.workloads import trace
from preble.plugins import policies
from preble.prompts.endpoints import ENDPOINTS
from preble.selection.routes import ROUTES
from preble.serving.telemetry.table import TABLE

pytestmark = pytest.mark.plain
ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("public_surface.txt")
HTTP_API = (ROOT / "docs" / "reference" / "http-api.md").read_text(encoding="utf-8")
OF_ADAPTERS = ("Engine", "EngineInfo", "EngineLoad", "HttpClient", "Ongoing", "Receiver")
"""What an adapter of somebody else's for an engine is made of (docs/howto/own-engine.md)."""
PLUG_INS = {
    "preble/integrations/ray/settings.py": ("request_router_config",),
    "preble/integrations/ray/direct.py": ("direct_application", "reported"),
    "preble/integrations/ray/reports.py": ("Reporter",),
    "preble/integrations/vllm_scheduler.py": ("PrebleScheduler", "PrebleAsyncScheduler"),
}
"""Names that engines and how-to pages import. They are read, not imported: their engines are not here. Of a class that
implements an engine's interface, only the name is ours."""
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def surface() -> Iterator[str]:
    """Yield a line for each thing that is promised."""
    for module, names in ((preble, preble.__all__), (preble.engines, OF_ADAPTERS)):
        for name in names:
            yield from of_python(f"{module.__name__}.{name}", getattr(module, name))
    yield from of_plug_ins()
    yield from (f"entry points {group}" for group in (registry.ENTRY_POINTS, policies.ENTRY_POINTS))
    yield from of_commands(cli, click.Context(cli, info_name="preble", **cli.context_settings))
    yield from of_settings()
    yield from (f"metric {one.name} {one.kind} {' '.join(one.labels)}".rstrip() for one in TABLE)
    yield from (f"path {path}" for path in (*ENDPOINTS, *PATHS))
    yield from (f"path {route.method} {route.path} (selection service)" for route in ROUTES)
    yield from of_http()
    yield from (f"policy {name}" for name in preble.policy_names())
    yield from (f"profile {name}" for name in preble.profile_names())
    yield from (f"workload {name}" for name in preble.workload_names())
    yield from of_format(f"trace {trace.VERSION}", trace._TaggedLine)
    yield from of_format(f"decision log {lines.VERSION}", lines._LogLine)
    yield from (f"log event {name}" for name in events())


def of_python(name: str, value: Any) -> Iterator[str]:
    yield f"python {name}{called(value) if callable(value) else ''}"
    if isinstance(value, type) and value.__module__.startswith("preble"):
        members = {*dir(value), *getattr(value, "__annotations__", ())}
        if issubclass(value, Enum):
            members = {*value.__members__}
        inherited = {name for base in value.__mro__ if base.__module__ == "builtins" for name in vars(base)}
        for member in sorted(one for one in members - inherited if not one.startswith("_")):
            found = inspect.getattr_static(value, member, None)
            if inspect.isfunction(found) or isinstance(found, classmethod | staticmethod):
                yield f"python {name}.{member}{called(getattr(value, member))}"
            else:
                yield f"python {name}.{member}"


def is_protocol(value: type) -> bool:
    return bool(getattr(value, "_is_protocol", False))


def called(value: Any) -> str:
    """Return how something is called: names of parameters, `=` behind those that may be left out."""
    if not inspect.isroutine(value) and (not isinstance(value, type) or issubclass(value, Enum) or is_protocol(value)):
        return ""  # nobody calls these, and each Python says something else of them
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except ValueError:
        return ""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    shown = [
        f"{stars.get(one.kind, '')}{one.name}{'' if one.default is one.empty else '='}"
        + (" (by name)" if one.kind is one.KEYWORD_ONLY else "")
        for one in parameters
        if not one.name.startswith("_")
    ]
    return f"({', '.join(shown)})"


def of_plug_ins() -> Iterator[str]:
    for file, names in PLUG_INS.items():
        defined = {
            node.name: node
            for node in ast.parse((ROOT / "src" / file).read_text(encoding="utf-8")).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
        }
        for name in names:
            node = defined[name]
            functions = [node] if isinstance(node, ast.FunctionDef) else [] if node.bases else node.body
            yield f"python {file.removesuffix('.py').replace('/', '.')}.{name}"
            for function in functions:
                if isinstance(function, ast.FunctionDef) and not function.name.startswith("_"):
                    of = f"{name}." if function is not node else ""
                    arguments = ast.unparse(function.args)
                    yield f"python {file.removesuffix('.py').replace('/', '.')}.{of}{function.name}({arguments})"


def of_commands(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"command {context.command_path} flag --help"
    for parameter in command.params:  # not `get_params`: what that adds depends on what ran before
        if not getattr(parameter, "hidden", False):
            is_flag = isinstance(parameter, click.Option) and parameter.is_flag
            names = ", ".join((*parameter.opts, *parameter.secondary_opts))
            what = "argument" if isinstance(parameter, click.Argument) else "flag" if is_flag else "option"
            yield f"command {context.command_path} {what} {names}"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield f"command {context.command_path} {name}"
                yield from of_commands(below, click.Context(below, parent=context, info_name=name))


def of_settings() -> Iterator[str]:
    for of, struct in (("", GatewayConfig), ("[[replicas]] ", ReplicaConfig), ("[[groups]] ", GroupConfig)):
        for knob in knobs(struct):
            yield f"setting {of}{knob.key}: {spelled(knob.type)}"


def spelled(hint: Any) -> str:
    """Return a type in words, without the bounds of its values."""
    if get_origin(hint) is Annotated:
        return spelled(get_args(hint)[0])
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return " | ".join(map(spelled, get_args(hint)))
    inner = [spelled(one) for one in get_args(hint) if one is not Ellipsis]
    name = "None" if hint is type(None) else getattr(hint, "__name__", str(hint))
    return f"{name}[{', '.join(inner)}]" if inner else name


def of_http() -> Iterator[str]:
    """Headers and codes of errors, from the page that another test compares with the code."""
    for title, kind in (("### Taken", "header or field taken"), ("## Headers of an answer", "header answered")):
        table = HTTP_API.partition(f"{title}\n")[2].partition("\n#")[0]
        rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
        yield from (f"{kind} {name}" for row in rows for name in re.findall(r"`([a-z0-9_-]+)", row))
    errors = HTTP_API.partition("## Errors\n")[2].partition("\n## ")[0]
    for status, codes in re.findall(r"^\| (\d+) \| (.+?) \|", errors, re.MULTILINE):
        yield from (f"error {status} {code}" for code in re.findall(r"`(\w+)`", codes))


def of_format(title: str, line: type[msgspec.Struct]) -> Iterator[str]:
    for kind in line.__subclasses__():
        if not kind.__name__.startswith("_"):
            fields = " ".join(kind.__struct_encode_fields__)
            yield f"format {title} {kind.__struct_config__.tag}: {fields}".rstrip(": ")
        yield from of_format(title, kind)


def events() -> Iterator[str]:
    """Every event that a log line may have, as far as a call of a logger names it."""
    for file in sorted((ROOT / "src" / "preble").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LEVELS
                and ast.unparse(node.func.value).rpartition(".")[2] in {"log", "_log"}
                and node.args
            ):
                for part in ast.walk(node.args[0]):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield part.value


def test_what_is_public_is_what_the_golden_file_says() -> None:
    text = "".join(f"{line}\n" for line in sorted({*surface()}))
    if os.environ.get("PREBLE_REWRITE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    kept = GOLDEN.read_text(encoding="utf-8").splitlines()
    missing, added = ({*kept} - {*text.splitlines()}, {*text.splitlines()} - {*kept})
    assert (missing, added) == (set(), set()), (
        "docs/reference/what-stays.md says how something public ends; then run `make golden` and review the diff"
    )
