"""What Preble's order costs vLLM before each batch: 100 waiting requests of 4,096 tokens, all cached but a tail.

Runs vLLM's scheduler without a model, in the environment that `make engines` makes; ends at once where there is none.

    python benchmarks/micro/vllm_order.py [--waiting 100] [--json FILE]

Cases, each the processor time of one call of `arrange_waiting`, the median and the 99th percentile of many:
- `still`: nothing has changed since the last batch;
- `turnover`: in each step one request leaves the line and one comes;
- `growing`: the prefix that all of them share is being computed, 64 blocks more are cached in each step;
- `evicted`: in each step the shared prefix loses its last 64 blocks;
- `burst`: all 100 requests are new;
- `asked`: for comparison, vLLM is asked for each request, without anything remembered.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENGINE_PYTHON = ROOT / ".engines" / "vllm" / "bin" / "python"
PROMPT, TAIL = 4096, 40
CHUNK_BLOCKS = 64
REPEATS = 200


def run_inside_vllm() -> None:
    """Go on in vLLM's environment. Ends the program where there is none."""
    if not ENGINE_PYTHON.is_file():
        print("vllm_order: left out, vLLM is not set up here (make engines)", file=sys.stderr)
        sys.exit(0)
    os.execv(ENGINE_PYTHON, [str(ENGINE_PYTHON), __file__, *sys.argv[1:]])


class Line:
    """A scheduler whose cache holds the shared prefix, and its waiting line."""

    def __init__(self, waiting: int) -> None:
        from bare_vllm import BLOCK_SIZE, BareVllm

        from preble.integrations.vllm_scheduler import PrebleScheduler

        self.vllm = BareVllm(PrebleScheduler, num_blocks=4 * PROMPT // BLOCK_SIZE, max_running=8)
        self.scheduler = self.vllm.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._chance = random.Random(0)
        self._prefix = [self._chance.randrange(100, 4000) for _ in range(PROMPT)]
        self._count = 0
        self.vllm.add("first", self._prefix)
        while self.vllm.num_unfinished:
            self.vllm.step()
        cached = self.vllm.request("probe", [*self._prefix, 1], 1)
        self.keys = [key for block in cached.block_hashes for key in self._entries(block)]
        self.fill(waiting)

    def _entries(self, block_hash: bytes) -> list[tuple[bytes, Any]]:
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        key = make_block_hash_with_group_id(block_hash, 0)
        return [(key, self.pool.cached_block_hash_to_block.get_one_block(key))]

    def fill(self, waiting: int) -> None:
        """Empty the line and let new requests come."""
        self.scheduler.waiting.clear()
        self.scheduler.arrange_waiting()
        for _ in range(waiting):
            self.come()

    def come(self) -> None:
        tail = [self._chance.randrange(100, 4000) for _ in range(TAIL)]
        self.scheduler.waiting.append(self.vllm.request(f"r{self._count}", [*self._prefix, *tail], 1))
        self._count += 1

    def cache_blocks(self, count: int) -> None:
        """Let exactly the first `count` blocks of the prefix be cached."""
        table = self.pool.cached_block_hash_to_block
        for i, (key, block) in enumerate(self.keys):
            if i >= count:
                table.pop(key, block.block_id)
            elif table.get_one_block(key) is None:
                table.insert(key, block)


def measured(change: Callable[[int], None], work: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of processor time of `work`, after `change(number)` each time."""
    times = []
    for number in range(REPEATS):
        change(number)
        start = time.thread_time()
        work()
        times.append(1000 * (time.thread_time() - start))
    times.sort()
    return {"median_ms": round(statistics.median(times), 4), "p99_ms": round(times[int(0.99 * REPEATS)], 4)}


def cases(waiting: int) -> Iterator[tuple[str, dict[str, float]]]:
    line = Line(waiting)
    blocks = len(line.keys)
    arrange = line.scheduler.arrange_waiting

    def turn_over(_: int) -> None:
        line.scheduler.waiting.popleft()
        line.come()

    def ask_for_all() -> None:
        for request in line.scheduler.waiting:
            line.vllm.cached_tokens(request)

    arrange()
    yield "still", measured(lambda number: None, arrange)
    yield "turnover", measured(turn_over, arrange)
    yield "growing", measured(lambda number: line.cache_blocks(CHUNK_BLOCKS * number % (blocks + 1)), arrange)
    yield "evicted", measured(lambda number: line.cache_blocks(-CHUNK_BLOCKS * number % (blocks + 1)), arrange)
    line.cache_blocks(blocks)
    yield "burst", measured(lambda number: line.fill(waiting), arrange)
    yield "asked", measured(lambda number: None, ask_for_all)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=100)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the numbers to FILE; - for stdout, instead of the table"
    )
    args = parser.parse_args()
    from preble.cli.output import STDOUT, write_json

    results = dict(cases(args.waiting))
    write_json(args.json, {"waiting": args.waiting, "prompt_tokens": PROMPT + TAIL, "cases": results})
    if args.json == STDOUT:
        return
    print(f"{args.waiting} waiting requests of {PROMPT + TAIL} tokens; per batch: median, 99th percentile")
    for name, result in results.items():
        print(f"  {name:10s} {result['median_ms']:8.3f} ms {result['p99_ms']:8.3f} ms")


if __name__ == "__main__":
    try:
        import vllm  # noqa: F401
    except ModuleNotFoundError:
        run_inside_vllm()
    sys.path.insert(0, str(ROOT / "dev" / "engines"))
    main()
