"""Fill in the numbers of README.md from the kept results.

python benchmarks/repro/readme.py
"""

from __future__ import annotations

from pathlib import Path

import backends
import grid
import performance
from page import filled

PAGE = Path(__file__).parents[2] / "README.md"


def shares_of_least_load() -> list[float]:
    """What least load carries for ever / what `preble` does, for each workload on four replicas."""
    results = grid.known_results()
    found = []
    for name, case in grid.EVALUATED.items():
        if case.group == "four" and (result := results.get(f"case-{name}")) is not None:
            carried = {one.policy: one.capacity_rps.mean for one in result.standings}
            found.append(carried["least_load"] / carried["preble"])
    return found


def values() -> dict[str, str]:
    """What README.md says, by marker."""
    shares, gains = shares_of_least_load(), backends.values(backends.known_results())
    return {
        "value:capacity": f"{1 / max(shares):.1f} to {1 / min(shares):.1f}",
        "value:workloads": str(len(shares)),
        "value:vllm": gains["value:vllm-12"],
        "value:sglang": gains["value:sglang-12"],
        "value:least-load": f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %",
    } | {f"value:{name}": performance.gateway_values()[name] for name in ("whole-ms", "event-us", "added-ms")}


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), values()), encoding="utf-8")


if __name__ == "__main__":
    main()
