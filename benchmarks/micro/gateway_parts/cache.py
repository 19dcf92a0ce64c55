"""What a replica of the gateway's benchmark caches, published as vLLM publishes it. It computes nothing either.

vLLM publishes one batch for each iteration that stores or evicts a block: long prompts in parts, and a block for every
16 tokens of an answer. So a replica publishes in most of its iterations, each time a few blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from preble.core.replica.prefix_cache import PrefixCache, hash_blocks
from preble.core.types import TOKEN_BYTES, PackedTokens, ReplicaId, pack_tokens
from preble.emulator import EmulatorConfig
from preble.emulator.kv.events import KvEventPublisher
from preble.prompts.tokens.tokenizer import PromptTokenizer

BLOCK_SIZE = 16
NUM_BLOCKS = 31_250
"""500,000 tokens: two prompts of 1 MB, or 260 of 8 KB."""
STEP_S = 0.01
"""Engines publish once for each iteration what all requests of it have changed."""
STEP_TOKENS = 8_192
"""Computed in one step at most; what is left of long prompts follows in the next ones."""
_BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES
_ANSWER_TOKEN = pack_tokens([1])
"""Each token of every answer. Its blocks are named by the prompt too, so they differ between prompts."""


class Computing:
    """One request: the tokens of its prompt and its answer so far, and the blocks of them that are cached."""

    def __init__(self, tokens: PackedTokens) -> None:
        self.tokens = bytearray(tokens)
        self.hashes: list[int] = []
        self.blocks: list[int] = []
        self.has_ended = False


class PublishedCache:
    """One replica's prefix cache and its KV events. Run `publish` as a task."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache = PrefixCache(ReplicaId("upstream"), NUM_BLOCKS, BLOCK_SIZE)
        self._publisher = KvEventPublisher(EmulatorConfig(profile="tiny-cpu", events_port=0))
        self._has_news = asyncio.Event()
        self._due: dict[Computing, None] = {}
        """Requests with blocks to compute or to release, the oldest first."""

    def take(self, prompt: str | Sequence[int] | None, body: bytes) -> Computing:
        """Cache the full blocks of a request's prompt, and of its answer. `prompt`: None for a chat."""
        request = Computing(self._tokens(prompt, body))
        self._is_due(request)
        return request

    def add_token(self, request: Computing) -> None:
        """The answer has one token more."""
        request.tokens += _ANSWER_TOKEN
        if not len(request.tokens) % _BLOCK_BYTES:
            self._is_due(request)

    def end(self, request: Computing) -> None:
        """The answer is complete. What is cached may be evicted from now on."""
        request.has_ended = True
        self._is_due(request)

    def _is_due(self, request: Computing) -> None:
        self._due[request] = None
        self._has_news.set()

    def _step(self) -> None:
        """Compute what is due, as much as one iteration of an engine does."""
        left = STEP_TOKENS // BLOCK_SIZE
        for request in list(self._due):
            self._name_blocks(request)
            start, stop = len(request.blocks), min(len(request.blocks) + left, len(request.hashes))
            if stop - start > self._cache.pool.num_free:
                break  # until another request ends
            request.blocks += self._cache.allocate(stop - start)
            tokens = PackedTokens(bytes(request.tokens[start * _BLOCK_BYTES : stop * _BLOCK_BYTES]))
            self._cache.insert(request.blocks, request.hashes, start, stop, tokens)
            left -= stop - start
            if stop < len(request.hashes):
                break
            del self._due[request]
            if request.has_ended:
                self._cache.release(request.blocks)

    def _name_blocks(self, request: Computing) -> None:
        """Find out its full blocks, and use those that are cached."""
        parent = request.hashes[-1] if request.hashes else None
        new = bytes(request.tokens[len(request.hashes) * _BLOCK_BYTES :])
        request.hashes += hash_blocks(new, BLOCK_SIZE, parent)
        if not request.blocks:
            request.blocks = self._cache.lock(request.hashes[: self._cache.match(request.hashes)])

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
                    self._step()
                    if not self._due:
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
