"""Several policies under the same load, side by side, for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from preble.bench.counters import total
from preble.bench.run import BenchResult


def comparison(engine: str, results: Mapping[str, BenchResult]) -> dict[str, Any]:
    """`{"engine": …, "policies": {policy: {…}}}`: the summary of each run, in plain JSON types.

    `hit_rate` comes from the engines' own counters, `hit_rate_reported` from the usage in answers. Times in seconds.
    """
    return {"engine": engine, "policies": {policy: _numbers(result) for policy, result in results.items()}}


def improvement(better: BenchResult, than: BenchResult) -> str:
    """Return one sentence on how two runs differ, better or worse."""
    if better.summary.ttft is None or than.summary.ttft is None:
        return "no request was answered; there is nothing to compare"
    computed, before = total(better.engines).computed_tokens, total(than.engines).computed_tokens
    share = 1 - computed / before if before else 0.0
    ratio = than.summary.ttft.mean_s / better.summary.ttft.mean_s
    return (
        f"{abs(share):.0%} {'fewer' if share >= 0 else 'more'} prompt tokens computed, "
        f"mean TTFT {ratio:.2f} times {'better' if ratio >= 1 else '(that is, worse)'}"
    )


def _numbers(result: BenchResult) -> dict[str, Any]:
    summary, counters = result.summary, total(result.engines)
    return {
        "ttft_mean_s": summary.ttft and summary.ttft.mean_s,
        "ttft_p50_s": summary.ttft and summary.ttft.p50_s,
        "ttft_p99_s": summary.ttft and summary.ttft.p99_s,
        "tpot_mean_s": summary.tpot and summary.tpot.mean_s,
        "e2e_mean_s": summary.e2e and summary.e2e.mean_s,
        "e2e_p99_s": summary.e2e and summary.e2e.p99_s,
        "hit_rate": counters.hit_rate,
        "hit_rate_reported": summary.hit_rate,
        "prompt_tokens": counters.queried_tokens,
        "recomputed_tokens": counters.computed_tokens,
        "requests": summary.requests,
        "errors": summary.errors,
        "errors_by_kind": summary.errors_by_kind,
        "requests_per_replica": summary.requests_per_replica,
        "requests_per_s": summary.requests_per_s,
        "lag_p99_s": summary.lag_p99_s,
        "partial": result.partial,
        "settings": msgspec.to_builtins(result.settings),
        "version": result.version,
    }
