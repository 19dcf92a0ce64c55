"""The emulated engine: a `LocalScheduler` whose iterations take as long as a `CostModel` says, in real time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import count, cycle, islice
from math import inf
from pathlib import Path
from zlib import crc32

from preble.core.costs.model import CostModel
from preble.core.replica.scheduler import Batch, LocalScheduler
from preble.core.types import TOKEN_BYTES, BlockHash, ReplicaId, Request, RequestId, Tier, pack_tokens
from preble.emulator.answers.tokenizer import EmulatedTokenizer
from preble.emulator.config import EmulatorConfig
from preble.emulator.generation import Generation, Piece, Prompt
from preble.emulator.kv.events import KvEventPublisher
from preble.emulator.kv.kept import KeptPrompts
from preble.emulator.kv.p2p_tier import KvSource, PeerTier, SharedId, num_cached_blocks
from preble.emulator.kv.tiers import EmulatedTiers
from preble.errors import PromptTooLong, RequestError


@dataclass(slots=True)
class _Live:
    """Where the tokens of a sequence go, and the place in its text that its next one has."""

    generation: Generation
    index: int
    place: int
    pieces: Sequence[str]
    copied_tokens: int
    said_cached: int | None


class EmulatedEngine:
    """One emulated replica without its network. `run` is its loop; `generate` gives it work."""

    def __init__(
        self,
        config: EmulatorConfig,
        cost_model: CostModel,
        tokenizer: EmulatedTokenizer,
        publisher: KvEventPublisher | None,
    ) -> None:
        self.block_size = config.block_size
        self.num_blocks = (config.kv_tokens or cost_model.profile.kv_capacity_tokens) // config.block_size
        capacity = self.num_blocks * config.block_size
        self.max_model_len = min(config.max_model_len or capacity, capacity)
        self._cost_model = cost_model
        self._speed = config.speed
        self._output_ids = tokenizer.output_ids
        self._output_pieces = tokenizer.output_pieces
        self._publisher = publisher
        self.scheduler = LocalScheduler(
            replica_id=ReplicaId("emulator"),
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
            order=config.order,
            drops_last_block=config.drops_last_block,
        )
        self._tiers = EmulatedTiers(
            config.host_tokens // config.block_size, Path(config.store) if config.store else None
        )
        self.peers = PeerTier() if config.p2p else None
        self.kept = KeptPrompts(self.scheduler, config.lease_s) if config.nixl else None
        self._death: Exception | None = None
        self.copied_tokens = 0
        """Prompt tokens that other replicas have sent."""
        self.reused_tokens = 0
        """Prompt tokens of ended requests that were cached here, and not sent for them by others."""
        self.reused_copied_tokens = 0
        """Prompt tokens of ended requests that others had sent for them: not all that is sent is used."""
        self._loading_s = 0.0
        """What the next iteration takes longer, because KV is loaded for it."""
        self._live: dict[RequestId, _Live] = {}
        self._ids = count()
        self._wake = asyncio.Event()

    @property
    def copied_bytes(self) -> int:
        """KV that other replicas have sent."""
        return self.copied_tokens * (self._cost_model.profile.kv_bytes_per_token or 0)

    @property
    def kv_cache_usage(self) -> float:
        """Blocks in use / all blocks, 0 ... 1."""
        return self.scheduler.num_used_blocks / self.num_blocks

    @contextmanager
    def generate(self, prompts: Sequence[Prompt]) -> Iterator[Generation]:
        """Start these sequences; leaving the context ends those that have not ended, at once.

        Raises: PromptTooLong, RequestError: one of them cannot be served; then none is started.
        """
        for prompt in prompts:
            self.require_fit(prompt)
        generation = Generation(num_open=len(prompts))
        started: list[RequestId] = []
        try:
            for index, prompt in enumerate(prompts):
                started.append(self._start(prompt, generation, index))
            self._wake.set()
            yield generation
        finally:
            for request_id in started:
                if self._live.pop(request_id, None) is not None:
                    self.scheduler.abort(request_id)

    @asynccontextmanager
    async def copying(self, source: KvSource | None, prompts: Sequence[Prompt]) -> AsyncIterator[Sequence[Prompt]]:
        """Wait for what `source` sends of these prompts, and give the prompts with it. Stay inside while they run."""
        if source is None or self.peers is None:
            yield prompts
            return
        try:
            with self.peers.using(source, [prompt.tokens for prompt in prompts]):
                blocks, one = await self.peers.blocks(source), prompts[0]
                come = num_cached_blocks(one.tokens, one.namespace, self.block_size, blocks) * self.block_size
                await asyncio.sleep(self.link_s(come))
                yield [replace(prompt, copied=blocks) for prompt in prompts]
        except SharedId as death:
            raise self.die(death) from death

    def link_s(self, num_tokens: int) -> float:
        """Return how many seconds the KV of these tokens takes from another replica."""
        link_s = self._cost_model.link_s(num_tokens)
        return (link_s + self._cost_model.link_latency_s) / self._speed if 0.0 < link_s < inf else 0.0

    def die(self, death: Exception) -> RequestError:
        """End the engine, as a bug of a real one does. Return the error for its request."""
        self._death = death
        self._wake.set()
        return RequestError("the engine has died")

    def num_blocks_of(self, prompt: Prompt) -> int:
        """Return how many blocks a prompt and its answer take. Raises: PromptTooLong."""
        self.require_fit(prompt)
        return -(-(len(prompt.tokens) // TOKEN_BYTES + prompt.output_tokens) // self.block_size)

    def require_fit(self, prompt: Prompt) -> None:
        """Raises: PromptTooLong: it and its answer are longer than any that is served."""
        num_prompt = len(prompt.tokens) // TOKEN_BYTES
        if num_prompt + prompt.output_tokens > self.max_model_len:
            raise PromptTooLong(
                f"This model's maximum context length is {self.max_model_len} tokens; the prompt has {num_prompt} and "
                f"{prompt.output_tokens} output tokens were asked for. Shorten the prompt or max_tokens."
            )

    def _start(self, prompt: Prompt, generation: Generation, index: int) -> RequestId:
        """Return where a prompt's answer begins in the emulated text, always the same, so the next turn finds its
        answer cached.
        """
        request_id = RequestId(str(next(self._ids)))
        request = Request(request_id, prompt.tokens, prompt.output_tokens, prompt.namespace)
        copied_tokens = self.block_size * len(self.scheduler.load(request, prompt.copied))
        self.copied_tokens += copied_tokens
        self._loading_s += sum(map(self._load_s, self.scheduler.load(request, self._tiers)))
        ids, pieces = prompt.output or (self._output_ids, self._output_pieces)
        place = 0 if prompt.output else (crc32(prompt.tokens) + prompt.seed) % len(ids)
        output = pack_tokens(islice(cycle(ids), place, place + prompt.output_tokens))
        self.scheduler.add(request, output, asyncio.get_running_loop().time())
        self._live[request_id] = _Live(generation, index, place, pieces, copied_tokens, prompt.said_cached)
        return request_id

    async def reset_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing changed, while something runs."""
        done = self.scheduler.reset_cache()
        await self._publish()
        return done

    async def run(self) -> None:
        """Compute one iteration after another until cancelled; sleep while there is no work."""
        loop = asyncio.get_running_loop()
        deadline = loop.time()
        while True:
            if self._death is not None:
                raise self._death
            batch = self.scheduler.next_batch(loop.time())
            if batch is None:
                self._wake.clear()
                await self._wake.wait()
                deadline = loop.time()
                continue
            # From the last deadline, not from now: what a sleep is late by is taken off the next one.
            deadline += self._iteration_s(batch)
            await asyncio.sleep(max(0.0, deadline - loop.time()))
            self._deliver(batch, loop.time())
            await self._publish()

    def _load_s(self, block: BlockHash) -> float:
        """Return seconds to load a block from where it is kept."""
        profile = self._cost_model.profile
        is_on_host = self._tiers.tier_of(block) is Tier.HOST
        rate_s = profile.host_load_s_per_token if is_on_host else profile.store_load_s_per_token
        return self.block_size * (rate_s or 0.0)

    def _iteration_s(self, batch: Batch) -> float:
        loading_s, self._loading_s = self._loading_s, 0.0
        return (batch.iteration_s(self._cost_model) + loading_s) / self._speed

    def _deliver(self, batch: Batch, now: float) -> None:
        result = self.scheduler.complete(batch, now)
        ended = {finished.request_id: finished for finished in result.finished}
        for request_id in (*result.decoded, *result.prefilled):
            live = self._live[request_id]
            text = live.pieces[live.place % len(live.pieces)]
            live.place += 1
            finished = ended.get(request_id)
            if finished is not None and live.said_cached is not None:
                finished = replace(finished, num_cached_tokens=live.said_cached)
            live.generation.feed(Piece(live.index, text, finished))
        for request_id, finished in ended.items():
            copied = min(self._live.pop(request_id).copied_tokens, finished.num_cached_tokens)
            self.reused_copied_tokens += copied
            self.reused_tokens += finished.num_cached_tokens - copied

    async def _publish(self) -> None:
        events = self.scheduler.take_events()
        copies = self._tiers.follow(events)
        if self._publisher is not None:
            await self._publisher.publish(events, copies)
