"""What a stream of KV events says that a replica caches, kept in the plainest way."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from preble.core.types import BlockHash, BlocksEvicted, BlocksStored, CacheCleared, KvEvent, ReplicaId, unpack_tokens
from preble.engines.kv_events.sockets import KvEventEndpoints, ReplayUnavailable, replayed
from preble.engines.kv_events.stream import KvEventStream
from preble.engines.kv_events.wire import WireEvent, decode_batch
from support.questions import Replica
from support.waiting import eventually

REPLAY_TIMEOUT_S = 30.0


class Belief:
    """Applies a replica's events.

    `clears`: how often the cache was said to be empty. `parent_missing`: stored blocks without their parent.
    """

    def __init__(self, stream: KvEventStream) -> None:
        self.stream = stream
        self.clears = 0
        self.parent_missing = 0
        self._blocks: dict[BlockHash, tuple[BlockHash | None, tuple[int, ...]]] = {}
        self._copies: Counter[BlockHash] = Counter()

    async def follow(self) -> None:
        await self.stream.follow(self.take)

    def take(self, changes: Sequence[KvEvent]) -> None:
        for change in changes:
            self.apply(change)

    def apply(self, event: KvEvent) -> None:
        match event:
            case CacheCleared():
                self.clears += 1
                self._blocks.clear()
                self._copies.clear()
            case BlocksEvicted():
                for block in event.block_hashes:
                    self._copies[block] -= 1
                    if not self._copies[block]:
                        del self._copies[block], self._blocks[block]
            case BlocksStored():
                self._store(event)

    def _store(self, event: BlocksStored) -> None:
        tokens, parent = tuple(unpack_tokens(event.tokens)), event.parent
        self.parent_missing += parent is not None and parent not in self._blocks
        for i, block in enumerate(event.block_hashes):
            self._blocks[block] = parent, tokens[i * event.block_size : (i + 1) * event.block_size]
            self._copies[block] += 1
            parent = block

    def __len__(self) -> int:
        return len(self._blocks)

    def usable_tokens(self, prompt: Sequence[int], block_size: int) -> int:
        """Leading tokens of a prompt that a request would find cached; its last token is always computed."""
        by_content = {content: block for block, content in self._blocks.items()}
        parent: BlockHash | None = None
        matched = 0
        while matched + block_size < len(prompt):
            content = parent, tuple(prompt[matched : matched + block_size])
            if content not in by_content:
                break
            parent = by_content[content]
            matched += block_size
        return matched

    async def settled(self, endpoints: KvEventEndpoints) -> None:
        """Return when everything that the engine has published so far is applied."""

        async def in_step() -> bool:
            return await newest_message(endpoints) == max(self.stream.position or 0, 0)

        await eventually(in_step, "in step with the engine")


async def predicted_and_found(
    belief: Belief, endpoints: KvEventEndpoints, replica: Replica, prompt: Sequence[int], max_tokens: int = 1
) -> tuple[int, int]:
    """Cached tokens of a prompt: as the events say, and as the engine then reports."""
    await belief.settled(endpoints)
    predicted = belief.usable_tokens(prompt, replica.block_size)
    return predicted, await replica.complete(prompt, max_tokens)


async def newest_message(endpoints: KvEventEndpoints) -> int:
    """Number of the engine's newest message, 0 for none.

    The engine's publisher takes turns between one waiting message and one such question, so what was waiting when we
    first asked is out when the answer has stayed the same for some turns.
    """
    answers: list[int] = []
    try:
        while len(answers) < 4 or len(set(answers[-4:])) > 1:
            newest = answers[-1] if answers else 0
            async with aclosing(replayed(endpoints, newest, REPLAY_TIMEOUT_S)) as messages:
                async for message in messages:
                    newest = message.seq
            answers.append(newest)
    except ReplayUnavailable as error:
        raise AssertionError("the engine does not answer replays") from error
    return answers[-1]


async def raw_events(endpoints: KvEventEndpoints, since: int) -> list[WireEvent]:
    """The engine's own events in its messages from number `since` on."""
    await newest_message(endpoints)
    async with aclosing(replayed(endpoints, since, REPLAY_TIMEOUT_S)) as messages:
        return [event async for message in messages for event in decode_batch(message.payload, unreadable)]


def unreadable(bad: ValueError) -> None:
    raise AssertionError(f"the engine sent what we cannot read: {bad}")


@asynccontextmanager
async def believing(endpoints: KvEventEndpoints, replica_id: str = "r0") -> AsyncIterator[Belief]:
    """A belief that follows the engine and is in step with it."""
    belief = Belief(KvEventStream(ReplicaId(replica_id), endpoints, replay_timeout_s=REPLAY_TIMEOUT_S))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(belief.follow())
        try:
            await eventually(lambda: belief.stream.position is not None, "caught up")
            yield belief
        finally:
            belief.stream.close()
