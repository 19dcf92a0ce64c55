"""Fill in the numbers of README.md from the kept results.

python benchmarks/repro/readme.py
"""

from __future__ import annotations

from pathlib import Path

import backends
import evaluation
from page import filled

PAGE = Path(__file__).parents[2] / "README.md"
RATE = 12.0
"""Requests a second of the runs on real engines: the higher rate, which both engines have."""


def shares_of_least_load() -> list[float]:
    """The capacity of least load / that of `preble`, for each workload on four replicas."""
    results = evaluation.known_results()
    found = []
    for name, case in evaluation.CASES.items():
        if case.group == "four":
            share = {standing.policy: standing.share_of_best for standing in results[name].standings_of(name)}
            found.append(share["least_load"] / share["preble"])
    return found


def gain(engine: str) -> float:
    """Round robin's mean E2E latency on this engine / that of `preble`."""
    backend = next(one for one in backends.known_results() if one.engine == engine)
    mean_e2e = [name == ("E2E", "mean") for name in backends.NUMBERS].index(True)
    ours, theirs = (
        backends.latencies_s(backend.select(policy, RATE))[mean_e2e] for policy in ("preble", "round_robin")
    )
    return theirs / ours


def values() -> dict[str, str]:
    """What README.md says, by marker."""
    shares = shares_of_least_load()
    return {
        "value:capacity": f"{1 / max(shares):.1f} to {1 / min(shares):.1f}",
        "value:vllm": f"{gain('vllm'):.1f}",
        "value:sglang": f"{gain('sglang'):.1f}",
        "value:least-load": f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %",
    }


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), values()), encoding="utf-8")


if __name__ == "__main__":
    main()
