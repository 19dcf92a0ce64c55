"""vLLM's KV offloading without a GPU: its scheduler's part is unchanged, and here is a worker that copies by torch.

vLLM imports it where the folder is on PYTHONPATH and `kv_connector_extra_config` names one of the two specs:
`HostMemorySpec` keeps copies in this process's memory, `SharedFolderSpec` has vLLM's tiers behind that.
"""

from __future__ import annotations

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostMemory(OffloadingWorker):
    """Copies each block at once. `host`: for each of the engine's tensors one with room for copies of its blocks."""

    def __init__(self, engine, host, region=None):
        self._pairs = list(zip(engine, host, strict=True))
        self._region = region
        self._done = []

    def submit_store(self, job_id, src_spec, dst_spec):
        for engine, host in self._pairs:
            host[_rows(dst_spec)] = engine[_rows(src_spec)]
        return self._has_done(job_id)

    def submit_load(self, job_id, src_spec, dst_spec):
        for engine, host in self._pairs:
            engine[_rows(dst_spec)] = host[_rows(src_spec)]
        return self._has_done(job_id)

    def _has_done(self, job_id):
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self):
        done, self._done = self._done, []
        return done

    def wait(self, job_ids):
        """Nothing is ever under way."""

    def shutdown(self):
        self._pairs.clear()  # they are views of the region's memory
        if self._region is not None:
            self._region.cleanup()


def _rows(spec):
    return [int(block) for block in spec.block_ids]


def _bytes_of(tensor):
    return tensor.tensor.view(torch.int8).view(-1, tensor.page_size_bytes)


class HostMemorySpec(CPUOffloadingSpec):
    """Copies in this process's memory."""

    def get_worker(self, kv_caches):
        if self._worker is None:
            assert self.blocks_per_chunk == 1
            host = [torch.zeros((self.num_chunks, one.page_size_bytes), dtype=torch.int8) for one in kv_caches.tensors]
            self._worker = HostMemory(list(map(_bytes_of, kv_caches.tensors)), host)
        return self._worker


class SharedFolderSpec(TieringOffloadingSpec):
    """Copies in memory that vLLM's further tiers read and write."""

    def get_worker(self, kv_caches):
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            host = [region.create_next_worker_view(one.page_size_bytes) for one in kv_caches.tensors]
            self._worker = HostMemory(list(map(_bytes_of, kv_caches.tensors)), host, region)
        return self._worker
