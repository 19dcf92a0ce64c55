"""Several policies under the same load, in turns: side by side, and what may be concluded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from preble.lab.bench.counters import CacheCounters, total
from preble.lab.bench.run import BenchResult
from preble.lab.metrics import RequestRecord, summarize

BUSY_LAG_S = 0.020
"""A load generator that sends this late has a machine too busy for latencies; on a quiet one it is 1 to 3 ms."""


def comparison(engine: str, turns: Mapping[str, Sequence[BenchResult]]) -> dict[str, Any]:
    """`{"engine": …, "policies": {policy: {…}}}`: the summary of each policy's turns together, in plain JSON types.

    `hit_rate` comes from the engines' own counters, `hit_rate_reported` from the usage in answers. Times in seconds;
    `ttft_mean_s_of_turns` has each turn's.
    """
    return {"engine": engine, "policies": {policy: _numbers(results) for policy, results in turns.items()}}


def joined(turns: Sequence[BenchResult]) -> BenchResult:
    """Return runs with the same settings as one, each after the end of the one before."""
    records: list[RequestRecord] = []
    engines: dict[str, CacheCounters] = {}
    for turn in turns:
        start_s = max((record.end_s for record in records), default=0.0)
        records += [_later(record, start_s) for record in turn.records]
        for url, counters in turn.engines.items():
            engines[url] = engines.get(url, CacheCounters()) + counters
    first = turns[0]
    summary = summarize(records, first.settings.slo)
    return msgspec.structs.replace(first, summary=summary, engines=engines, records=records)


def _later(record: RequestRecord, by_s: float) -> RequestRecord:
    first_token_s = None if record.first_token_s is None else record.first_token_s + by_s
    return msgspec.structs.replace(
        record,
        scheduled_s=record.scheduled_s + by_s,
        sent_s=record.sent_s + by_s,
        first_token_s=first_token_s,
        end_s=record.end_s + by_s,
    )


def improvement(better: Sequence[BenchResult], than: Sequence[BenchResult]) -> str:
    """Return one sentence on how two policies differ; without a verdict on latency if their turns disagree."""
    ratios = [_ttft_ratio(mine, other) for mine, other in zip(better, than, strict=True)]
    if None in ratios:
        return "a turn answered no request; there is nothing to compare"
    computed, before = (total(joined(turns).engines).computed_tokens for turns in (better, than))
    share = 1 - computed / before if before else 0.0
    tokens = f"{abs(share):.0%} {'fewer' if share >= 0 else 'more'} prompt tokens computed"
    each = [ratio for ratio in ratios if ratio]
    return f"{tokens}, {_latency_verdict(each, _ttft_ratio(joined(better), joined(than)))}"


def _latency_verdict(ratios: Sequence[float], overall: float | None) -> str:
    each = " and ".join(f"{ratio:.2f}" for ratio in ratios)
    if min(ratios) < 1 < max(ratios):
        return f"mean TTFT without a verdict: {each} times as good in its turns"
    return f"mean TTFT {overall:.2f} times {'better' if ratios[0] >= 1 else '(that is, worse)'} ({each} in its turns)"


def _ttft_ratio(better: BenchResult, than: BenchResult) -> float | None:
    mine, other = better.summary.ttft, than.summary.ttft
    return None if mine is None or other is None else other.mean_s / mine.mean_s


def too_busy(turns: Mapping[str, Sequence[BenchResult]]) -> str | None:
    """Return a warning if the load generator itself could not keep its times; None if it could."""
    lag_s = max(result.summary.lag_p99_s or 0.0 for results in turns.values() for result in results)
    if lag_s < BUSY_LAG_S:
        return None
    return (
        f"this machine was too busy for latencies: requests were sent up to {1000 * lag_s:.0f} ms late (p99). "
        "Tokens and hit rates hold; repeat it on a quiet machine for times"
    )


def _numbers(turns: Sequence[BenchResult]) -> dict[str, Any]:
    result = joined(turns)
    summary, counters = result.summary, total(result.engines)
    return {
        "ttft_mean_s": summary.ttft and summary.ttft.mean_s,
        "ttft_mean_s_of_turns": [turn.summary.ttft and turn.summary.ttft.mean_s for turn in turns],
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
