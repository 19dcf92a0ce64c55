"""Azure's public LLM inference traces (2023, 2024): CSV with arrival times and lengths, and no content.

Prompts are made up and share nothing, because the trace does not say what they had in common.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from preble.lab.workloads.lines import bad_line, numbered_lines
from preble.lab.workloads.loaders.assemble import assembled, own_segment, seconds_of, workload_name
from preble.lab.workloads.loaders.options import LoadOptions
from preble.lab.workloads.model import Workload, WorkloadRequest
from preble.lab.workloads.trace import MAX_TOKENS

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
EXAMPLE = "2023-11-16 18:17:03.9799600,4808,10"


def read_azure(path: Path, options: LoadOptions) -> Workload:
    """Raises: TraceFormatError."""
    note = "lengths and times of an Azure trace; it has no content, so prompts are made up and share nothing"
    return assembled(path, _requests(path), note)


def _requests(path: Path) -> Iterator[WorkloadRequest]:
    lines = numbered_lines(path)
    number, header = next(lines, (1, b""))
    columns = csv_cells(header)
    if missing := [name for name in COLUMNS if name not in columns]:
        raise bad_line(path, number, f"column {missing[0]} is missing; the first line is {','.join(COLUMNS)}")
    places = [columns.index(name) for name in COLUMNS]
    for number, line in lines:
        cells = csv_cells(line)
        try:
            if len(cells) != len(columns):
                raise ValueError(f"{len(cells)} cells for {len(columns)} columns")
            time, context, generated = (cells[place] for place in places)
            yield _request(f"{workload_name(path)}-{number}", time, int(context), int(generated))
        except ValueError as error:
            raise bad_line(path, number, f"{','.join(cells)!r}: {error}; a line looks like {EXAMPLE}") from error


def _request(request_id: str, time: str, context_tokens: int, generated_tokens: int) -> WorkloadRequest:
    if context_tokens < 1 or generated_tokens < 0:
        raise ValueError("a prompt has at least one token, an answer not fewer than none")
    if max(context_tokens, generated_tokens) > MAX_TOKENS:
        raise ValueError(f"a prompt or an answer has at most {MAX_TOKENS} tokens")
    return WorkloadRequest(
        request_id, (own_segment(request_id, context_tokens),), max(1, generated_tokens), arrival_s=seconds_of(time)
    )


def csv_cells(line: bytes) -> list[str]:
    """Return the cells of a line of plain CSV: without quotes, spaces around them removed."""
    return [cell.strip() for cell in line.decode("utf-8", "replace").split(",")]
