"""How Python's cyclic garbage collector is set in a gateway."""

from __future__ import annotations

import gc


def freeze_gc() -> None:
    """Let the collector look at old objects hardly ever, and at what is there now never.

    The scheduler's trees are hundreds of thousands of objects that reference counting frees by itself. A full
    collection walks all of them, and with 64 replicas that stopped every request for a tenth of a second. What is
    garbage in cycles, mostly exceptions and their tracebacks, is young and is still found.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000, 10, 1_000)
