"""ServeGen-style traces: arrival times and lengths by client, and no content.

Requests of one client begin with its system prompt: `LoadOptions.client_share` of the client's median prompt length,
or all but one token of a prompt that is no longer. The rest is unique to the request.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
from msgspec import Meta

from preble.lab.workloads.lines import decoded_lines
from preble.lab.workloads.loaders.assemble import MadeUpSegments, assembled, own_segment, workload_name
from preble.lab.workloads.loaders.options import LoadOptions
from preble.lab.workloads.model import Workload, WorkloadRequest
from preble.lab.workloads.trace import AnswerTokens, NumTokens

EXAMPLE = '{"timestamp": 12.5, "client": 31, "input_length": 1338, "output_length": 39}'


class _ServegenLine(msgspec.Struct, frozen=True):
    """`timestamp`: milliseconds."""

    timestamp: Annotated[float, Meta(ge=0)]
    client: int | str
    input_length: NumTokens
    output_length: AnswerTokens


def read_servegen(path: Path, options: LoadOptions) -> Workload:
    """Raises: TraceFormatError."""
    lines = dict(decoded_lines(path, _ServegenLine, EXAMPLE))
    prompts = _SystemPrompts(workload_name(path), list(lines.values()), options.client_share)
    note = (
        f"lengths and times of a ServeGen trace; each of {prompts.num_clients} clients has a system prompt of "
        f"{options.client_share:g} of its median prompt"
    )
    return assembled(path, [prompts.request(number, line) for number, line in lines.items()], note)


class _SystemPrompts:
    """Makes requests; those of one client share its system prompt."""

    def __init__(self, name: str, lines: list[_ServegenLine], share: float) -> None:
        lengths: dict[int | str, list[int]] = {}
        for line in lines:
            lengths.setdefault(line.client, []).append(line.input_length)
        self._name = name
        self._tokens = {client: round(share * median(values)) for client, values in lengths.items()}
        self._segments = MadeUpSegments()

    @property
    def num_clients(self) -> int:
        return len(self._tokens)

    def request(self, number: int, line: _ServegenLine) -> WorkloadRequest:
        request_id, prompt_id = f"{self._name}-{number}", f"{self._name}:client:{line.client}"
        whole = self._tokens[line.client]
        num_shared = min(whole, line.input_length - 1)
        shared = (self._segments.beginning(prompt_id, num_shared, whole),) if num_shared else ()
        return WorkloadRequest(
            request_id,
            (*shared, own_segment(request_id, line.input_length - num_shared)),
            max(1, line.output_length),
            arrival_s=line.timestamp / 1000,
            group=prompt_id,
        )
