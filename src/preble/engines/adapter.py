"""What the gateway needs from a replica, whatever program it runs: the base class of every adapter.

One `Engine` is the client of one replica. It knows the program's dialect (how to ask for its configuration, its token
ids, its KV events). It knows no other replica, no scheduler and no client of the gateway. How to write one:
docs/howto/own-engine.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import NamedTuple

from preble.core.types import KvEvent, ReplicaId, ReplicaSpec
from preble.engines.awaited import AwaitedAnswer
from preble.engines.http import HttpClient
from preble.engines.kv_events.sockets import KvEventEndpoints
from preble.errors import EngineRefused
from preble.web.client.pool import Ongoing, Receiver


@dataclass(frozen=True, slots=True)
class PriorityOrder:
    """How an engine orders what waits in it by the `priority` of a body.

    `step`: what each later class of ours adds to it. `is_required`: a body without one comes after all others; else it
    counts as 0, which the first class has.
    """

    step: int
    is_required: bool = False

    def value(self, rank: int) -> int | None:
        """Return the `priority` to write for a class by its place, the first one 0; None for none.

        >>> PriorityOrder(1).value(0), PriorityOrder(1).value(2), PriorityOrder(-1, is_required=True).value(0)
        (None, 2, 0)
        """
        return self.step * rank if rank or self.is_required else None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a replica says of itself.

    `engine`: the program's name, such as "vllm". `models`: the names it serves, the base model first. `adapters`: those
    of them that are adapters (LoRA) on the base model, whose prompts share no KV with it. `roots`: what each was loaded
    from, in the order of `models`; empty where it does not say. `spec`: what the scheduler
    has to know. `kv_events`: where its KV events are, for each data-parallel rank; empty where it reports none.
    `priority`: None where it orders requests by none, or would refuse one.
    """

    engine: str
    models: tuple[str, ...]
    spec: ReplicaSpec
    max_model_len: int | None = None
    version: str | None = None
    adapters: tuple[str, ...] = ()
    kv_events: tuple[KvEventEndpoints, ...] = ()
    roots: tuple[str, ...] = ()
    priority: PriorityOrder | None = None


class ModelNames(NamedTuple):
    """The names that a replica serves, the base model first, those of them that are adapters on it, and their roots."""

    models: tuple[str, ...]
    adapters: tuple[str, ...]
    roots: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A replica's load by its own account, other clients' requests included.

    `running`, `waiting`: requests. `kv_tokens`: tokens of KV cache in use, without those that are only cached.
    """

    running: int
    waiting: int
    kv_tokens: int


class Engine(ABC):
    """The client of one replica. An adapter must define `probe` and `check_ready`.

    It may replace `begin` and `close`, which speak HTTP. The other methods are capabilities; by default a replica has
    none of them, and the gateway does without.
    """

    takes_cache_salt = False
    """Whether its bodies may have a `cache_salt`, and KV of different ones is kept apart."""
    takes_ids = False
    """Whether a completion may have token ids in place of its text. The parity check compares the answers."""
    model_path: str | None = None
    """What it was started with, where a probe has learned it."""
    adapters: tuple[str, ...] = ()
    """Model adapters that the server is known to have loaded. Set by whoever keeps the live replicas."""
    kv_peer: str | None = None
    """`HOST:PORT` from which others get its KV, where a probe has found that it offers that."""
    given_kv_peer: str | None = None
    """The same where the operator says it."""
    transport = ""
    """How it sends KV to others, such as "nixl", where a probe has found that both must have the same one."""
    rank: int | None = None
    """Its data-parallel rank, if it is one of several behind one address."""
    num_ranks = 1
    """How many data-parallel ranks the server has; a rank of it knows, too."""
    rests_until = 0.0
    """Until when it computes no prompts for others, since it failed to; by the event loop's clock."""
    last_leg_at = last_output_at = -inf
    """When it last did its part in the transfer of a prompt, and last sent anything of an answer, as one of a pair."""
    failed_leg: ReplicaId | None = None
    """Of two that answer a request together: the other one, if that has failed."""

    def __init__(self, http: HttpClient, kv_events: KvEventEndpoints | None = None) -> None:
        """`http`: opens no connection until it is used. `kv_events`: where the operator says that KV events are."""
        self.http = http
        self.given_kv_events = kv_events

    @classmethod
    async def recognizes(cls, http: HttpClient) -> bool:
        """Return whether this adapter's program runs at `http`. `engine = "auto"` asks each adapter.

        Raises: EngineError: the replica does not answer at all.
        """
        return False

    @property
    def replica_id(self) -> ReplicaId:
        return self.http.replica_id

    @property
    def url(self) -> str:
        return self.http.url

    @property
    def adapter(self) -> str:
        """Its class, as `module:Class`."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    # essentials

    @abstractmethod
    async def probe(self) -> EngineInfo:
        """Ask the replica what it is and serves. Raises: EngineError."""

    @abstractmethod
    async def check_ready(self) -> None:
        """Return if the replica can take requests now. Must be cheap. Raises: EngineError."""

    def begin(self, path: str, body: bytes, headers: Mapping[str, str], receiver: Receiver) -> Ongoing:
        """POST a JSON body. `receiver` hears what becomes of it, not before this returns. Limits no wait for an answer.

        Raises: EngineRefused: nothing was sent.
        """
        return self.http.begin(path, body, headers, receiver)

    def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> AwaitedAnswer:
        """Do as `begin`, for coroutines and within `HttpTimeouts`: a context that waits for the head of the answer.

        Raises, on entering: EngineRefused, EngineGone, EngineTimeout.
        """
        return AwaitedAnswer(self.http, partial(self.begin, path, body, headers))

    async def close(self) -> None:
        """Close every connection. May be called twice."""
        await self.http.close()

    # capabilities

    def ranks(self) -> tuple[Engine, ...]:
        """Return the replicas behind this address, known after a probe: data-parallel ranks have a cache each."""
        return (self,)

    def of_rank(self, rank: int) -> Engine:
        """Return the client of one of several replicas behind this address, where another process has probed it."""
        raise self.http.error(EngineRefused, f"has no rank {rank}")

    def paired(self, prefill: Engine) -> Engine | None:
        """Return what answers one request together: this replica decodes, and `prefill`, one of the same program,
        computes the prompt. None where the program cannot.
        """
        return None

    def answers_in_pairs(self, path: str, body: bytes) -> bool:
        """Return whether it can answer this one with another one that computes the prompt."""
        return True

    async def models(self) -> ModelNames | None:
        """Return what it serves now; asked with each health check. None where that cannot change while it runs.

        Raises: EngineError.
        """
        return None

    async def tokenize(self, body: bytes) -> list[int]:
        """Return the token ids of a completion or chat body, as the engine itself would make them.

        Raises: EngineRefused: it cannot. EngineError. RequestError: the engine says that the body is wrong.
        """
        raise self.http.error(EngineRefused, "has no /tokenize; give the gateway a tokenizer (--tokenizer)")

    async def follow_kv_events(self, take: Callable[[Sequence[KvEvent]], None]) -> None:
        """Give `take` the changes of the replica's prefix cache, from the beginning, without end.

        Starts with `CacheCleared`, then everything that is cached now, then every change, as many at once as came
        together. After a gap that cannot be replayed, or a restart of the engine, it starts over in the same way.
        Reconnects by itself; `EventsLost` says that this takes long, and it starts over afterwards. Ends when closed,
        or at once, without a call, where the replica reports none. Call `take` in the event loop's thread, and not
        after this has ended: the replica may have left by then.
        """
        return

    @property
    def has_caught_up(self) -> bool:
        """Whether the KV events have come to what the replica does now; True where there are none."""
        return True

    def learn_block_size(self, block_size: int) -> bool:
        """Take the block size of its KV events for its own. True if the next probe will say another one for it."""
        return False

    def resync_kv_events(self) -> None:
        """Make the KV events start over soon, because they do not add up. Does nothing where there are none."""
        return

    def loads(self) -> AsyncIterator[EngineLoad | None] | None:
        """Yield the load that the replica reports, without end. None where it does not report any.

        Yields None when the reports stop: then its load is unknown. Reconnects by itself; ends when closed.
        """
        return None
