"""vLLM's scheduler and its KV cache without a model: batches are made and answered, nothing is computed.

For tests and benchmarks of `preble.integrations.vllm_scheduler`; runs in the environment of vLLM. What the scheduler
does is real: blocks, hashes, evictions, preemptions. The tokens that it gets are a fixed function of their position.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

TINY_MODEL = Path(__file__).resolve().parents[2] / ".engines" / "models" / "tiny-llama"
BLOCK_SIZE = 16


class BareVllm:
    """One scheduler of class `scheduler_cls` with `num_blocks` blocks of 16 tokens.

    `sliding_window`: tokens of a second kind of layers, None for full attention alone. `additional_config`: as
    vLLM's flag.
    """

    def __init__(
        self,
        scheduler_cls: type,
        *,
        num_blocks: int,
        max_running: int,
        max_batch_tokens: int = 1024,
        max_model_len: int = 8192,
        sliding_window: int | None = None,
        additional_config: dict[str, Any] | None = None,
        policy: str = "fcfs",
    ) -> None:
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(TINY_MODEL), dtype="float32", max_model_len=max_model_len, skip_tokenizer_init=True
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=max_running,
                max_num_batched_tokens=max_batch_tokens,
                max_model_len=max_model_len,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
                policy=policy,
            ),
            cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
            additional_config=additional_config or {},
        )
        config.cache_config.num_gpu_blocks = num_blocks
        kinds = [FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)]
        if sliding_window is not None:
            kinds.append(
                SlidingWindowSpec(
                    block_size=BLOCK_SIZE,
                    num_kv_heads=1,
                    head_size=1,
                    dtype=torch.float32,
                    sliding_window=sliding_window,
                )
            )
        groups = [KVCacheGroupSpec([f"layer{i}"], kind) for i, kind in enumerate(kinds)]
        cache = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.scheduler = scheduler_cls(
            config, cache, StructuredOutputManager(config), BLOCK_SIZE, BLOCK_SIZE, log_stats=True
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)

    @property
    def num_unfinished(self) -> int:
        return int(self.scheduler.get_num_unfinished_requests())

    @property
    def num_used_blocks(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def request(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> Any:
        """A request of vLLM's own type that generates exactly `max_tokens`."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 1) -> Any:
        request = self.request(request_id, prompt, max_tokens)
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> list[str]:
        """One batch. Returns the ids of the requests that it admitted, those that were preempted before too."""
        before = {request.request_id for request in self.scheduler.running}
        batch = self.scheduler.schedule()
        admitted = [r.request_id for r in self.scheduler.running if r.request_id not in before]
        self.scheduler.update_from_output(batch, self._answer(list(batch.num_scheduled_tokens)))
        return admitted

    def _answer(self, ids: list[str]) -> ModelRunnerOutput:
        """A token for each request whose prompt is complete."""
        requests = [self.scheduler.requests[request_id] for request_id in ids]
        tokens = [[] if request.is_prefill_chunk else [100 + request.num_tokens % 1000] for request in requests]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def cached_tokens(self, request: Any) -> int:
        """What vLLM itself finds in its cache for a waiting request."""
        manager = self.scheduler.kv_cache_manager
        return int(manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1])
