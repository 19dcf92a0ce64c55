"""The study of one workload."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from preble import __version__
from preble.core.types import TOKEN_BYTES, PackedTokens
from preble.errors import ConfigError
from preble.lab.workloads.model import Workload, WorkloadRequest
from preble.lab.workloads.study.distribution import Distribution, distribution
from preble.lab.workloads.study.prefixes import PrefixSharing, study_sharing
from preble.lab.workloads.study.sessions import SessionStudy, study_sessions
from preble.lab.workloads.study.timing import ArrivalStudy, study_arrivals
from preble.lab.workloads.tokens import packed_prompt

Tokenize = Callable[[WorkloadRequest], PackedTokens]
"""Makes a request's prompt packed token ids."""


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a workload. Lengths are in tokens.

    `prompt_to_output`: prompt tokens / output tokens of a request. `has_text`: prompts are text, so their lengths
    depend on the tokenizer. `arrivals`: None if the workload has no times. `sessions`: None if it has none.
    """

    name: str
    note: str
    requests: int
    has_text: bool
    prompt_tokens: Distribution
    output_tokens: Distribution
    prompt_to_output: Distribution
    sharing: PrefixSharing
    arrivals: ArrivalStudy | None
    sessions: SessionStudy | None


class StudyReport(msgspec.Struct, frozen=True):
    """Studies side by side, with their settings.

    `sources`: names and files, as given. `requests`: of each; None for all of a trace. `seed`: of named workloads.
    `tokenizer`: the file that counted the tokens of text; None if a word counts as a token.
    """

    sources: tuple[str, ...]
    requests: int | None
    seed: int
    tokenizer: str | None
    studies: tuple[Study, ...]
    version: str = __version__


def study(
    workload: Workload, *, tokenize: Tokenize = packed_prompt, on_request: Callable[[], None] = lambda: None
) -> Study:
    """Return the study of a workload. Calls `on_request` after each request, for progress.

    `tokenize`: a model's tokenizer for prompts of text; the built-in one counts words. Keeps the distinct tokens of all
    prompts in memory, four bytes each, and one whole prompt at a time.

    Raises: ConfigError: the workload has no request, or a prompt has no token.
    """
    if not workload.requests:
        raise ConfigError(f"workload {workload.name!r} has no request; choose another one")
    lengths: list[int] = []

    def prompt(request: WorkloadRequest) -> PackedTokens:
        tokens = tokenize(request)
        if not tokens:
            raise ConfigError(f"the prompt of request {request.request_id!r} has no token; leave the request out")
        lengths.append(len(tokens) // TOKEN_BYTES)
        on_request()
        return tokens

    sharing = study_sharing(map(prompt, workload.requests))
    outputs = [request.output_tokens for request in workload.requests]
    ratios = [length / output for length, output in zip(lengths, outputs, strict=True)]
    return Study(
        name=workload.name,
        note=workload.note,
        requests=len(lengths),
        has_text=any(request.segments[0].tokens is None for request in workload.requests),
        prompt_tokens=distribution(lengths),
        output_tokens=distribution(outputs),
        prompt_to_output=distribution(ratios),
        sharing=sharing,
        arrivals=study_arrivals([r.arrival_s for r in workload.openers if r.arrival_s is not None]),
        sessions=study_sessions(workload.requests, lengths),
    )
