"""Fill in the numbers of README.md from the kept results.

python benchmarks/repro/readme.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import backends
import gains
import made_by
import performance
from page import filled

PAGE = Path(__file__).parents[2] / "README.md"


def values() -> dict[str, str]:
    """What README.md says, by marker."""
    engines = backends.values(backends.known_results())
    costs = performance.gateway_values()
    return {
        **gains.values(gains.known_gains()),
        "value:vllm": engines["value:vllm-12"],
        "value:sglang": engines["value:sglang-12"],
        **made_by.values(),
        **{f"value:{name}": costs[name] for name in ("whole-ms", "event-us", "added-ms")},
    }


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), values()), encoding="utf-8")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
