"""Three real vLLM that split requests between each other, while sources, targets and clients are killed at random.

    python benchmarks/repro/real_kills.py                    # half an hour; keeps the result and draws it
    python benchmarks/repro/real_kills.py --seed 1           # this seed again
    python benchmarks/repro/real_kills.py --rounds 4 --try   # to try it out; keeps nothing
    python benchmarks/repro/real_kills.py --draw

A gateway splits every request, over two replicas drawn by chance. In each round several clients ask and one of them
leaves; in two of three rounds a source or a target is killed, and started again afterwards. A wrong answer, or an
answer that was lost though its own replica lived, ends the run with an error. So does a replica that keeps anything two
leases later. Set up by `make engines` and `python3 dev/setup.py nixl`. Kept: benchmarks/results/real_kills.json.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import cpu_engines
import msgspec
from page import fill

from preble.config import ReplicaConfig
from preble.engines.starting.launch import ReplicaProcess
from preble.engines.starting.ports import free_ports

sys.path.insert(0, str(cpu_engines.ROOT / "tests"))
from support.gateways import gateway_before, idle
from support.linked import linked_profile
from support.nixl_vllm import LEASE_S, nixl_vllm
from support.split_burst import SplitBurst
from support.splitting import always_splitting

PAGE = cpu_engines.ROOT / "docs" / "concepts" / "splits.md"
RESULT = cpu_engines.RESULTS / "real_kills.json"
REPLICAS, ROUNDS, SEEDS = 3, 6, (1, 2, 3)
LENGTH = 645
READY_S = 600.0
GOES = (None, "source", "target")


class Killed(msgspec.Struct, frozen=True):
    """One seed's rounds. `split`: requests of `right + lost + left`. `left`: clients; `lost`: answers that broke off
    when the replica that gave them was killed. `lease_s`: of a prompt that nobody fetches. `empty_after_s`: the
    longest until nothing was kept any more.
    """

    seed: int
    rounds: int
    sources: int
    targets: int
    split: int
    right: int
    left: int
    lost: int
    lease_s: float
    empty_after_s: float


async def play(seed: int, rounds: int) -> Killed:
    """Play the rounds. Raises: AssertionError: what must not happen has happened."""
    rng, goes_of_all, empty_after_s = Random(seed), Counter[str](), 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with AsyncExitStack() as stack:
            fleets = [nixl_vllm(folder / str(port), port) for port in free_ports(REPLICAS)]
            await asyncio.gather(*(stack.enter_async_context(fleet) for fleet in fleets))
            processes = {fleet.urls[0]: fleet.replicas[0] for fleet in fleets}
            profile = linked_profile(folder, s_per_token=0.1, bytes_per_s=1e9, latency_s=0.01)
            gateway = await stack.enter_async_context(
                gateway_before([ReplicaConfig(url) for url in processes], always_splitting(profile, None))
            )
            burst = SplitBurst(gateway, list(processes), rng, lambda url: processes[url].kill(), LENGTH)
            await burst.know(next(iter(processes)))
            for i in range(rounds):
                goes = rng.choice(GOES)
                await burst.round(goes)
                empty_after_s = max(empty_after_s, await burst.nothing_is_left(2.0 * LEASE_S))
                for url in processes.keys() - set(burst.alive):
                    goes_of_all[goes or ""] += 1
                    await _start_again(processes[url])
                    burst.alive.append(url)
                print(f"seed {seed}, round {i + 1}: {goes}, {dict(burst.ends)}", file=sys.stderr, flush=True)
            await idle(gateway)
    ends = burst.ends
    return Killed(
        seed=seed,
        rounds=rounds,
        sources=goes_of_all["source"],
        targets=goes_of_all["target"],
        split=burst.num_split,
        right=ends["right"],
        left=ends["left"],
        lost=ends["lost"],
        lease_s=LEASE_S,
        empty_after_s=round(empty_after_s, 1),
    )


async def _start_again(process: ReplicaProcess) -> None:
    await process.start()
    await process.wait_ready(READY_S)


def known() -> list[Killed]:
    return msgspec.json.decode(RESULT.read_bytes(), type=list[Killed]) if RESULT.exists() else []


def table(found: Sequence[Killed]) -> str:
    """Markdown: a row for each seed."""
    rows = [
        "| seed | rounds | sources killed | targets killed | split | right | clients that left | broke off "
        "| lease | nothing kept after |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        cells = (one.seed, one.rounds, one.sources, one.targets, one.split, one.right, one.left, one.lost)
        rows.append("| " + " | ".join(map(str, cells)) + f" | {one.lease_s:g} s | {one.empty_after_s:g} s |")
    return "\n".join(rows)


def draw() -> None:
    fill([PAGE], {"real-kills": table(known()) + "\n"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--try", dest="only_try", action="store_true")
    parser.add_argument("--draw", action="store_true")
    given = parser.parse_args()
    for seed in () if given.draw else given.seed or SEEDS:
        found = asyncio.run(play(seed, given.rounds))
        print(found, flush=True)
        if not given.only_try:
            kept = sorted([*(one for one in known() if one.seed != seed), found], key=lambda one: one.seed)
            RESULT.write_bytes(b"[\n" + b",\n".join(map(msgspec.json.encode, kept)) + b"\n]\n")
    if not given.only_try:
        draw()


if __name__ == "__main__":
    main()
