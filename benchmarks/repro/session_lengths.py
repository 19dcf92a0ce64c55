"""Whether knowing a request's session helps to place it: by the lengths of the session's answers so far.

    python benchmarks/repro/session_lengths.py           # ten minutes on two cores
    python benchmarks/repro/session_lengths.py --draw    # fill the page from the result that is there

Four H100 with Llama-3-8B, simulated, and coding agents (`coding`). `preble` expects an answer to be as long as those to
the longest prefix that the prompt shares: of a session's next turn, that is what the session has said so far. `by name`
expects the mean of the session's last answers, and before there are some what `preble` does. `known` knows each length,
the most that any prediction can bring. In `own lengths` all answers of a session are longer or shorter by one factor,
which suits `by name` best: log-normal, sigma 0.8.
Result: benchmarks/results/session_lengths.json. Page: docs/decisions/0008-the-policy-preble.md.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from math import exp
from pathlib import Path
from statistics import mean

import msgspec
from made_by import note
from page import fill

from preble.core.policies.preble import Preble
from preble.core.policies.view import Choice, ClusterView
from preble.core.types import Request
from preble.lab.metrics import RequestRecord
from preble.lab.sim import SimConfig, simulate
from preble.lab.workloads import Workload
from preble.lab.workloads.registry import make_workload
from preble.profiles import load_profile

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "session_lengths.json"
PAGE = ROOT / "docs" / "decisions" / "0008-the-policy-preble.md"
PROFILE = "h100-llama-3-8b"
REQUESTS, RATE = 500, 6.0
SIGMAS = {"as drawn": 0.0, "own lengths": 0.8}
WAYS = ("by prefix", "by name", "known")
SEEDS = (1, 2)
FEW = 2.0
"""For how many answers the expectation from before counts, as for a prefix."""
LAST = 32
"""Answers of a session that count, as of a prefix."""


class Run(msgspec.Struct, frozen=True):
    """One run. `error`: mean distance of the expected length from the true one, by the mean length."""

    lengths: str
    way: str
    seed: int
    error: float
    e2e_s: float
    ttft_s: float


class Expecting(Preble):
    """Places by the lengths that `expect` returns, given the request and what `preble` expects."""

    def __init__(self, expect: Callable[[Request, float], float]) -> None:
        super().__init__()
        self._expect = expect

    def choose(self, view: ClusterView, rng: random.Random) -> Choice:
        view.expected_output_tokens = self._expect(view.request, view.expected_output_tokens)
        return super().choose(view, rng)


def run(lengths: str, way: str, seed: int) -> Run:
    made = made_workload(SIGMAS[lengths], seed)
    asked = {request.request_id: request for request in made.requests}
    answers: dict[str | None, deque[int]] = {}
    errors: list[float] = []

    def expect(request: Request, by_prefix: float) -> float:
        one = asked[request.request_id]
        known = answers.get(one.session, ())
        by_name = (sum(known) + FEW * by_prefix) / (len(known) + FEW)
        tokens = dict(zip(WAYS, (by_prefix, by_name, float(one.output_tokens)), strict=True))[way]
        errors.append(abs(tokens - one.output_tokens))
        return tokens

    def on_record(record: RequestRecord) -> None:
        answers.setdefault(asked[record.request_id].session, deque(maxlen=LAST)).append(record.output_tokens)

    config = SimConfig(profile=load_profile(PROFILE), replicas=4, policy="preble", seed=seed)
    records = simulate(config, made, on_record, policy=Expecting(expect)).records
    return Run(
        lengths,
        way,
        seed,
        error=round(mean(errors) / mean(one.output_tokens for one in made.requests), 4),
        e2e_s=round(mean(one.end_s - one.scheduled_s for one in records if one.end_s is not None), 4),
        ttft_s=round(mean(one.ttft_s for one in records if one.ttft_s is not None), 4),
    )


def made_workload(sigma: float, seed: int) -> Workload:
    """Return sessions that begin at random times, with answers of a session longer or shorter by one factor."""
    made, rng = make_workload("coding", REQUESTS, seed), random.Random(seed)
    factors = {one.session: exp(rng.gauss(-sigma * sigma / 2, sigma)) for one in made.requests}
    requests = [
        replace(one, output_tokens=max(round(one.output_tokens * factors[one.session]), 1)) for one in made.requests
    ]
    every_s, now = REQUESTS / RATE / len(made.openers), 0.0
    times = [now := now + rng.expovariate(1 / every_s) for _ in made.openers]
    return replace(made, requests=tuple(requests)).with_arrivals(times)


def table(runs: Sequence[Run]) -> str:
    """Return means over seeds, times by those of `by prefix`, as a table in Markdown."""
    lines = ["| answers of a session | expected | error, of a mean answer | mean E2E | mean TTFT |", "|" + "---|" * 5]
    for lengths, way in product(SIGMAS, WAYS):
        ours = [one for one in runs if (one.lengths, one.way) == (lengths, way)]
        base = {one.seed: one for one in runs if (one.lengths, one.way) == (lengths, WAYS[0])}
        times = (
            mean(one.e2e_s / base[one.seed].e2e_s for one in ours),
            mean(one.ttft_s / base[one.seed].ttft_s for one in ours),
        )
        cells = (lengths, way, f"{mean(one.error for one in ours):.2f}", *(f"{time:.3f}" for time in times))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def kept_runs() -> list[Run]:
    return msgspec.json.decode(RESULT.read_bytes(), type=list[Run])


def values(runs: Sequence[Run]) -> dict[str, str]:
    """Return what the page says of the results."""
    return {"session-lengths": table(runs) + "\n"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--draw", action="store_true", help="fill the page only")
    given = parser.parse_args()
    if not given.draw:
        with ProcessPoolExecutor(given.jobs) as pool:
            runs = list(pool.map(run, *zip(*product(SIGMAS, WAYS, SEEDS), strict=True)))
        RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(runs), indent=1) + b"\n")
        note("session_lengths")
    fill([PAGE], values(kept_runs()))


if __name__ == "__main__":
    main()
