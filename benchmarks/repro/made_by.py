"""Which policy made the kept results: a digest of what it decides, the commit and the day.

    python benchmarks/repro/made_by.py            # list results of an earlier policy, and say so on the pages
    python benchmarks/repro/made_by.py grid_map   # note that today's policy made these

Scripts that keep a result note it themselves. Kept: benchmarks/results/made_by.json.
"""

from __future__ import annotations

import argparse
import subprocess
from datetime import UTC, date, datetime
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

import msgspec
from page import fill

from preble.lab.compare import read_result
from preble.lab.compare.result import write_result

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "benchmarks" / "results" / "made_by.json"
DECISIONS = ROOT / "tests" / "golden"
"""What policies decide in small runs, as tests keep it: two policies that decide alike are one."""
E2 = ("burst", "hot_prefix", "paper_steps")
"""Results of the paper's policy; all others are of `preble`."""
DEAR = MappingProxyType(
    {
        "backends": "ten minutes of a machine that does nothing else, with engines",
        "coming_turns": "half an hour",
        "fidelity": "eight minutes of a machine that does nothing else, with engines",
        "gains": "a quarter of an hour on the compiled core",
        "gateway_ranking": "half an hour of a machine that does nothing else",
        "gateways": "an hour",
        "grid_case": "some hours",
        "grid_harm": "five minutes, compiled",
        "grid_map": "half an hour, compiled",
        "grid_pure": "a minute, compiled",
        "held_out": "a quarter of an hour, compiled",
        "policy_steps": "six minutes, compiled",
        "real_check": "an hour of a machine that does nothing else, with engines",
        "real_copies": "half an hour, with engines",
        "session_lengths": "ten minutes; it says that nothing depends on it",
    }
)
"""Results that a change of the policy may leave as they are, as long as their pages say so, and how long they take."""
MARKS = MappingProxyType(
    {
        "backends": ("backends", "value:sglang", "value:vllm"),
        "coming_turns": ("coming-turns",),
        "fidelity": ("preble", "round_robin", "value:means-within", "value:gains-"),
        "gains": ("gains", "value:gain-"),
        "gateway_ranking": ("gateway-agreement",),
        "gateways": ("gateways.",),
        "grid_case": ("grid-cases", "value:case-"),
        "grid_harm": ("grid-harm", "value:harm-"),
        "grid_map": ("grid-capacity", "grid-latency", "grid-everybody", "value:map-"),
        "grid_pure": ("grid-pure",),
        "held_out": ("held-out", "value:held-out"),
        "policy_steps": ("knobs", "rivals", "steps"),
        "real_check": ("real-check", "value:real-"),
        "real_copies": ("real-copies",),
        "session_lengths": ("session-lengths",),
    }
)
"""How the markers of these begin, wherever a page shows them."""
PAGES = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / name
        for name in (
            "index.md",
            "evaluation.md",
            "fidelity.md",
            "concepts/copies.md",
            "concepts/rebalancing.md",
            "concepts/scale.md",
            "concepts/splits.md",
            "howto/compare-policies.md",
            "howto/targets.md",
        )
    ),
    ROOT / "docs" / "decisions" / "0008-the-policy-preble.md",
    ROOT / "docs" / "decisions" / "0008-what-was-tried.md",
    ROOT / "benchmarks" / "EVALUATION.md",
)


class Maker(msgspec.Struct, frozen=True):
    """The digest of the policy that made a result, the commit that the code was of, and when."""

    policy: str
    commit: str
    day: date


def policy_of(result: str) -> str:
    """Return the name of the policy whose digest the result has."""
    return "e2" if result in E2 else "preble"


def policy_digest(policy: str = "preble") -> str:
    """Return a digest of what the policy decides today."""
    paths = (DECISIONS / f"simulation.{policy}{name}.jsonl" for name in ("", ".lengths"))
    return sha256(b"".join(path.read_bytes() for path in paths if path.exists())).hexdigest()[:12]


def commit() -> str:
    """Return the commit that the code is of, with `-dirty` where it is not quite: whatever has become of results."""
    head, changed = (
        subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        for command in (
            ("rev-parse", "--short=12", "HEAD"),
            ("diff", "HEAD", "--name-only", "--", "src", "benchmarks/repro"),
        )
    )
    return f"{head}-dirty" if changed else head


def makers() -> dict[str, Maker]:
    """Return who made each kept result, by its name in benchmarks/results."""
    return msgspec.json.decode(KEPT.read_bytes(), type=dict[str, Maker])


def note(*names: str) -> None:
    """Keep that today's policy made these results."""
    code, day = commit(), datetime.now(UTC).date()
    found = makers() | {name: Maker(policy_digest(policy_of(name)), code, day) for name in names}
    KEPT.write_bytes(msgspec.json.format(msgspec.json.encode(found, order="sorted"), indent=1) + b"\n")


def begin(name: str, *comparisons: Path) -> bool:
    """Note that today's policy makes a result from now on, and return whether what is kept of it is of an earlier one.

    Take that one's runs out of these comparisons, so that what goes on where it was cut off mixes no two policies.
    """
    is_old = name in old()
    note(name)
    for path in comparisons if is_old else ():
        if path.exists():
            result = read_result(path)
            kept = [run for run in (*result.runs, *result.other_runs) if run.policy != policy_of(name)]
            write_result(
                msgspec.structs.replace(result, is_complete=False, standings=[], runs=[], other_runs=kept), path
            )
    return is_old


def old() -> dict[str, Maker]:
    """Return the results that another policy than today's made."""
    return {name: maker for name, maker in makers().items() if maker.policy != policy_digest(policy_of(name))}


def values() -> dict[str, str]:
    """Return for each result whose policy it is of, as a part of a sentence."""
    earlier = old()
    return {
        f"value:policy-{name}": f"the `{policy_of(name)}` of {maker.day.day} {maker.day:%B %Y} ({maker.commit}), "
        "not today's"
        if name in earlier
        else f"today's `{policy_of(name)}`"
        for name, maker in makers().items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", metavar="RESULT", help="one that today's policy made")
    named = parser.parse_args().results
    if unknown := set(named) - makers().keys():
        parser.error(f"there is no result {', '.join(sorted(unknown))}")
    note(*named)
    fill(PAGES, values())
    for name, maker in old().items():
        print(f"{name}: of {maker.day}, {maker.commit}; anew: {DEAR.get(name, 'minutes')}")
