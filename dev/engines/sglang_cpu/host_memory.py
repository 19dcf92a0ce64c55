"""What SGLang's hierarchical cache (`--enable-hierarchical-cache`) needs to keep KV in the host's memory on a CPU.

It copies between a GPU's memory and the host's, in streams of work of its own. On a CPU both are the same memory, so
copies are assignments, done at once: nothing has to be registered, recorded or waited for. Run it with
`--hicache-io-backend direct --hicache-mem-layout layer_first`, the only way that is implemented here.

Importing this module, after `stand_ins`, puts the stand-ins in place.
"""

from __future__ import annotations

from typing import Any

import sglang.srt.mem_cache.pool_host.mha as host_pool
import torch


class CudaRuntime:
    """Registers host memory with nobody."""

    def cudaHostRegister(self, *_: object) -> int:
        return 0

    def cudaHostUnregister(self, *_: object) -> int:
        return 0


class Event:
    """In a stream in which everything is done at once."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, *_: object) -> None:
        pass

    def wait(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _: object) -> float:
        return 0.0


def transfer_kv_direct(
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy the KV of these tokens from one pool to the other, layer by layer."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()]


def nothing(*_: Any, **__: Any) -> None:
    """In place of waiting."""


def put_in_place() -> None:
    torch.cuda.cudart = CudaRuntime
    torch.cpu.Event = Event
    for name in ("wait_event", "wait_stream", "synchronize", "record_event"):
        if not hasattr(torch.cpu.Stream, name):
            setattr(torch.cpu.Stream, name, nothing)
    host_pool.transfer_kv_direct = transfer_kv_direct


put_in_place()
