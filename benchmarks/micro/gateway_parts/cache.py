"""What a replica of the gateway's benchmark caches, published as vLLM publishes it. It computes nothing either."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from preble.core.replica.prefix_cache import PrefixCache, hash_blocks
from preble.core.types import TOKEN_BYTES, PackedTokens, ReplicaId, pack_tokens
from preble.engines.emulator import EmulatorConfig
from preble.engines.emulator.events import KvEventPublisher
from preble.serving.tokens.tokenizer import PromptTokenizer

BLOCK_SIZE = 16
NUM_BLOCKS = 31_250
"""500,000 tokens: two prompts of 1 MB, or 260 of 8 KB."""
STEP_S = 0.01
"""Engines publish once for each iteration what all requests of it have changed."""


class PublishedCache:
    """One replica's prefix cache and its KV events. Run `publish` as a task."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache = PrefixCache(ReplicaId("upstream"), NUM_BLOCKS, BLOCK_SIZE)
        self._publisher = KvEventPublisher(EmulatorConfig(profile="tiny-cpu", events_port=0))
        self._has_news = asyncio.Event()

    def take(self, prompt: str | Sequence[int] | None, body: bytes) -> None:
        """Cache the full blocks of a request's prompt. `prompt`: None for a chat."""
        tokens = self._tokens(prompt, body)
        hashes = hash_blocks(tokens, BLOCK_SIZE)
        held = self._cache.match(hashes)
        blocks = self._cache.lock(hashes[:held])
        if held < len(hashes):
            blocks += self._cache.allocate(len(hashes) - held)
            new = PackedTokens(tokens[held * BLOCK_SIZE * TOKEN_BYTES : len(hashes) * BLOCK_SIZE * TOKEN_BYTES])
            self._cache.insert(blocks, hashes, held, len(hashes), new)
            self._has_news.set()
        self._cache.release(blocks)

    def _tokens(self, prompt: str | Sequence[int] | None, body: bytes) -> PackedTokens:
        if prompt is None:
            return self._tokenizer.chat(body)
        return self._tokenizer.completion(prompt) if isinstance(prompt, str) else pack_tokens(prompt)

    async def publish(self) -> None:
        """Send what has changed, once a step, until cancelled; repeat what was missed to who asks."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._publisher.serve_replay())
                while True:
                    await self._has_news.wait()
                    await asyncio.sleep(STEP_S)
                    self._has_news.clear()
                    await self._publisher.publish(self._cache.take_events())
        finally:
            self._publisher.close()

    def sources(self) -> dict[str, object]:
        """The answer to `/kv_event_sources`."""
        return {"0": self._publisher.source()}

    def metrics(self) -> str:
        """The one metric by which a gateway learns the size of the cache. One block is vLLM's placeholder."""
        labels = f'block_size="{BLOCK_SIZE}",engine="0",num_gpu_blocks="{NUM_BLOCKS + 1}"'
        return f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{labels}}} 1.0\n"
