"""The format of a file, by its first line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from preble.errors import ConfigError, TraceFormatError
from preble.lab.workloads.lines import bad_line, numbered_lines
from preble.lab.workloads.loaders import azure, mooncake, openai, segments, servegen, sharegpt
from preble.lab.workloads.loaders.options import LoadOptions
from preble.lab.workloads.model import Workload
from preble.lab.workloads.trace import read_own

_OWN, _MAYBE_OWN = '"kind": "trace"', '"kind"'
"""Stand for the first line of our own format, and for any object with a `kind`: only where nothing else fits is that
ours, and then it has a mistake."""
_ARRAY = "[...]"
"""Stands for the keys of a file that is one JSON array."""


@dataclass(frozen=True, slots=True)
class Format:
    """A way to write a trace. `marks`: a file whose first line has all the keys or columns of one of them is of it."""

    name: str
    marks: tuple[tuple[str, ...], ...]
    read: Callable[[Path, LoadOptions], Workload]


FORMATS = (
    Format("preble", ((_OWN,),), lambda path, _: read_own(path)),
    Format("azure", (azure.COLUMNS,), azure.read_azure),
    Format("mooncake", (("timestamp", "input_length", "output_length", "hash_ids"),), mooncake.read_mooncake),
    Format("servegen", (("timestamp", "client", "input_length", "output_length"),), servegen.read_servegen),
    Format("segments", (("segs", "n_in", "n_out"), ("id", "n_tok")), segments.read_segments),
    Format("sharegpt", (("conversations",), ("conversation",), (_ARRAY,)), sharegpt.read_sharegpt),
    Format("openai", (("messages",), ("prompt",), ("body",), ("request",)), openai.read_openai),
)
"""The first that fits is taken."""


def format_names() -> tuple[str, ...]:
    """Return the formats that `read_trace` reads."""
    return tuple(known.name for known in FORMATS)


def read_trace(
    path: Path,
    *,
    format: str | None = None,  # noqa: A002 - the word for it; the builtin is not used here
    options: LoadOptions | None = None,
) -> Workload:
    """Return the workload in a trace file, plain or compressed; see docs/howto/bring-your-trace.md.

    `format`: one of `format_names()`; None to detect it by the file's first line. `options`: what the file does not
    say. Prompts share segments by reference. Requests come by arrival, the first at 0.0 s, except in Preble's own
    format, which is taken as it stands; an answer of no token counts as one. The same file gives the same workload.

    Raises: TraceFormatError: the file cannot be read, is in no known format, or has a bad line. ConfigError: an unknown
    format.
    """
    return (_detected(path) if format is None else _named(format)).read(path, options or LoadOptions())


def _named(name: str) -> Format:
    for known in FORMATS:
        if known.name == name:
            return known
    raise ConfigError(f"trace format {name!r} is not known; choose one of {', '.join(format_names())}")


def _detected(path: Path) -> Format:
    number, line = next(numbered_lines(path), (1, b""))
    keys = _keys(line)
    for known in FORMATS:
        if any(keys >= set(mark) for mark in known.marks):
            return known
    if _MAYBE_OWN in keys:
        return FORMATS[0]
    if not line:
        raise TraceFormatError(f"{path}: the file is empty")
    marks = "; ".join(f"{known.name} ({' or '.join(', '.join(mark) for mark in known.marks)})" for known in FORMATS)
    seen = line[:80].decode("utf-8", "replace").strip()
    raise bad_line(
        path,
        number,
        f"no known format begins with {seen!r}; known formats, by their keys or columns: {marks}",
    )


def _keys(line: bytes) -> set[str]:
    """Return the keys of a JSON object, the columns of a CSV header."""
    if line.lstrip().startswith(b"["):
        return {_ARRAY}
    if not line.lstrip().startswith(b"{"):
        return set(azure.csv_cells(line))
    try:
        found = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return set()
    return {*found, *([_MAYBE_OWN] if "kind" in found else []), *([_OWN] if found.get("kind") == "trace" else [])}
