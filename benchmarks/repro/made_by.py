"""Which `preble` made the kept results: a digest of what the policy decides, and the day.

    python benchmarks/repro/made_by.py            # say on the pages which results are of an earlier policy
    python benchmarks/repro/made_by.py grid       # note that today's policy made these

Scripts that keep a result note it themselves. Kept: benchmarks/results/made_by.json.
"""

from __future__ import annotations

import sys
from datetime import UTC, date, datetime
from hashlib import sha256
from pathlib import Path

import msgspec
from page import fill

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "benchmarks" / "results" / "made_by.json"
DECISIONS = tuple(ROOT / "tests" / "golden" / f"simulation.preble{name}.jsonl" for name in ("", ".lengths"))
"""What `preble` decides in two small runs, as tests keep it: two policies that decide alike are one."""
PAGES = (
    *(
        ROOT / "docs" / name
        for name in ("evaluation.md", "concepts/scale.md", "concepts/copies.md", "howto/compare-policies.md")
    ),
    ROOT / "docs" / "decisions" / "0008-the-policy-preble.md",
    ROOT / "benchmarks" / "EVALUATION.md",
)


class Maker(msgspec.Struct, frozen=True):
    """The digest of the policy that made a result, and when."""

    policy: str
    day: date


def policy_digest() -> str:
    """Return a digest of what `preble` decides today."""
    return sha256(b"".join(path.read_bytes() for path in DECISIONS)).hexdigest()[:12]


def makers() -> dict[str, Maker]:
    """Return who made each kept result, by its name in benchmarks/results."""
    return msgspec.json.decode(KEPT.read_bytes(), type=dict[str, Maker])


def note(*names: str) -> None:
    """Keep that today's policy made these results."""
    today = Maker(policy_digest(), datetime.now(UTC).date())
    found = makers() | dict.fromkeys(names, today)
    KEPT.write_bytes(msgspec.json.format(msgspec.json.encode(found, order="sorted"), indent=1) + b"\n")


def values() -> dict[str, str]:
    """Return for each result whose policy it is of, as a part of a sentence."""
    today = policy_digest()
    return {
        f"value:policy-{name}": "today's `preble`"
        if maker.policy == today
        else f"the `preble` of {maker.day.day} {maker.day:%B %Y}, not today's"
        for name, maker in makers().items()
    }


if __name__ == "__main__":
    note(*sys.argv[1:])
    fill(PAGES, values())
