"""Small trace files, and what is in a workload that was made of one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from preble.core.types import unpack_tokens
from preble.errors import TraceFormatError
from preble.lab.workloads import Workload, WorkloadRequest, packed_prompt
from preble.lab.workloads.loaders import LoadOptions, read_trace

WHY = {"role": "user", "content": "Why?"}
CHAT = {"model": "m", "messages": [WHY], "max_tokens": 9}
TALK = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Why?"},
    {"from": "gpt", "value": "Because it is."},
    {"from": "human", "value": "Really?"},
    {"from": "gpt", "value": "Yes."},
]


def file_of(folder: Path, lines: Iterable[object], name: str = "day.jsonl") -> Path:
    """A file of these lines; what is not text is written as JSON."""
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def loaded(folder: Path, *lines: object, **options: Any) -> Workload:
    return read_trace(file_of(folder, lines), options=LoadOptions(**options))


def refusal(folder: Path, *lines: object, **options: Any) -> str:
    """What is said of a file that cannot be loaded."""
    path = file_of(folder, lines)
    with pytest.raises(TraceFormatError) as caught:
        read_trace(path, options=LoadOptions(**options))
    assert str(caught.value).startswith(str(path))
    return str(caught.value).removeprefix(str(path))


def tokens(request: WorkloadRequest) -> list[int]:
    return list(unpack_tokens(packed_prompt(request)))


def common(a: WorkloadRequest, b: WorkloadRequest) -> int:
    """Tokens that both prompts begin with."""
    pairs = enumerate(zip(tokens(a), tokens(b), strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(tokens(a)), len(tokens(b))))


def lengths(workload: Workload) -> list[tuple[int, int]]:
    return [(len(tokens(request)), request.output_tokens) for request in workload.requests]


def arrivals(workload: Workload) -> list[float | None]:
    return [None if r.arrival_s is None else round(r.arrival_s, 4) for r in workload.requests]


def assert_children_continue(workload: Workload) -> int:
    """Every prompt with a parent begins with the parent's whole prompt. How many there are."""
    by_id = {request.request_id: request for request in workload.requests}
    children = [(request, by_id[request.parent]) for request in workload.requests if request.parent]
    for child, parent in children:
        assert packed_prompt(child).startswith(packed_prompt(parent)), child.request_id
        assert child.session == parent.session
    return len(children)
