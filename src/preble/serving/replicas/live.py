"""The replicas in the rotation: what each one is and which models they serve."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest
from math import inf

from preble.background import Backoff
from preble.core.cluster.replicas import NO_DECODE, NO_PREFILL, longest_prompt
from preble.core.types import TOKEN_BYTES, BlocksStored, PackedTokens, ReplicaId, Request, Role, namespace_of
from preble.core.types.life import Ended, Fact, TransferFailed
from preble.engines.adapter import Engine, EngineInfo, EngineLoad, ModelNames
from preble.errors import NoReplicaError, UnknownModel
from preble.serving.parity.report import ParityReport
from preble.serving.placed import LocalPlaced

FIRST_WAIT_S = 10.0
LONGEST_WAIT_S = 640.0
_NOT_FOUND = 404
_SHOWN_MODELS = 20
"""The most names in the answer to a request for an unknown model: thousands of adapters may be served."""


class ResyncBackoff:
    """Allows a restart of the KV events at once, then less and less often while restarts do not help.

    A restart replays thousands of messages. It does not help where the index, at its memory budget, has dropped the
    blocks on which the events build.
    """

    def __init__(self) -> None:
        self._backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S, rng=None)
        self._next_at = -inf

    def is_due(self, now: float) -> bool:
        """Return whether to start over now, and if so count it as done. `now`: seconds of a monotonic clock."""
        if now < self._next_at:
            return False
        if now > self._next_at + LONGEST_WAIT_S:  # it has helped
            self._backoff.reset()
        self._next_at = now + self._backoff.next_s()
        return True


@dataclass(slots=True)
class ProbePrompt:
    """A prompt that a check has sent, and how many of its tokens the replica's KV events have reported as stored.

    Counted as events arrive: behind a long replay, a look now and then may come after the blocks were evicted.
    """

    tokens: PackedTokens
    reported_tokens: int = 0

    def note(self, event: BlocksStored) -> None:
        """The replica has stored blocks, of this prompt or of another one."""
        if self.tokens.startswith(event.tokens, self.reported_tokens * TOKEN_BYTES):
            self.reported_tokens += len(event.tokens) // TOKEN_BYTES


@dataclass(eq=False, slots=True)
class LiveReplica:
    """A replica in the rotation. Setting `suspect` has its monitor check it at once.

    `trusted`: whether matches there count. `takes_ids`: it answers token ids as it answers their text. `parity`: the
    last report on its token ids and cache, None before any.
    `engine_load`: the load that the engine reports, with other clients' requests; None where it reports none.
    `failed_copies`: copies in a row, to it or from it, that brought nothing; `last_copy_failed`: when the last one did.
    `has_lost_events`: its KV events do not arrive, so its cache is estimated. `probe_prompt`: what a check sent last.
    """

    engine: Engine
    info: EngineInfo
    engine_load: EngineLoad | None = None
    has_lost_events: bool = False
    trusted: bool = True
    takes_ids: bool = False
    failed_copies: int = 0
    last_copy_failed: float = -inf
    parity: ParityReport | None = None
    probe_prompt: ProbePrompt | None = None
    suspect: asyncio.Event = field(default_factory=asyncio.Event)
    resync_backoff: ResyncBackoff = field(default_factory=ResyncBackoff)


class ModelReplicas:
    """What requests for one model need to know of the replicas: worked out once for all of them, not for each.

    `others`: the live replicas that do not serve it. `base_model`: of those that do, "" where they have several.
    `label`: the name in metrics: the one that the client gave, else the first one that is served.
    `engine`: the program that most of them run, "" if there is none. `takes_ids`: each of them answers token ids
    as it answers their text, which is not known of adapters. `longest_prompt`: in tokens, that one of them takes,
    `shortest_prompt`: that all of them take; infinity where it is not known. `only_in_pairs`: those that answer nothing
    alone; `answers_alone`: whether another one does. `paired`: one that another one may compute prompts for.
    """

    def __init__(self, model: str | None, replicas: Mapping[ReplicaId, LiveReplica], others: frozenset[ReplicaId]):
        those = [replica for replica_id, replica in replicas.items() if replica_id not in others]
        infos = [replica.info for replica in those]
        lengths = [longest_prompt(info.spec) for info in infos]
        base_models = {info.spec.model for info in infos}
        self.others = others
        self.label = (model or next(iter(infos[0].models), "")) if infos else ""
        self._name = model
        self.base_model = base_models.pop() if len(base_models) == 1 else ""
        engines = Counter(info.engine for info in infos)
        self.engine = max(engines, key=lambda name: (engines[name], name), default="")
        decoding = [one for one in those if not one.info.spec.answers_alone]
        self.only_in_pairs = frozenset(one.engine.replica_id for one in decoding)
        self.answers_alone = any(one not in decoding and one.info.spec.role is not Role.PREFILL for one in those)
        may_be = (one.engine for one in those if one.info.spec.splits or one.info.spec.role is Role.DECODE)
        self.paired: Engine | None = next(may_be, None)
        self._is_adapter = any(model in info.adapters for info in infos)
        self.takes_ids = bool(those) and not self._is_adapter and all(replica.takes_ids for replica in those)
        self.longest_prompt, self.shortest_prompt = max(lengths, default=inf), min(lengths, default=inf)

    def namespace(self, cache_salt: str | None) -> str:
        """Return the namespace in which prompts with this model and salt share KV."""
        return namespace_of(self._name if self._is_adapter else None, cache_salt)


class LiveReplicas(dict[ReplicaId, LiveReplica]):
    """The table of live replicas by id, in the order in which they joined. `Rotation` alone adds and removes them.

    `num_taking`: how many take new requests: they are not drained, and one that decodes has another that prefills.
    `take_cache_salts`: whether every live replica keeps KV of different cache salts apart. `longest_prompt`: in tokens,
    that one of them takes; infinity where it is not known. `one_model`: whether all of them run the same base model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_taking = 0
        self._of_model: dict[str | None, ModelReplicas] = {}
        self.take_cache_salts = True
        self.longest_prompt = inf
        self.one_model = False
        self.held_back: frozenset[ReplicaId] = frozenset()
        """Live replicas that get no new requests, because they are drained."""
        self._listeners: list[Callable[[], None]] = []
        self._next_change: asyncio.Future[None] | None = None

    def listen(self, on_change: Callable[[], None]) -> None:
        """Call this after each later change of the table, of names or of `held_back`."""
        self._listeners.append(on_change)

    def on(self, placed: LocalPlaced, fact: Fact, now: float) -> None:
        """Have a replica checked that has failed a request, or does not know its model (404): another may run there."""
        if isinstance(fact, TransferFailed):
            if fact.failed is not None:
                self.suspect(fact.failed)
        elif isinstance(fact, Ended) and (fact.status == _NOT_FOUND or fact.outcome.blames_replica):
            self.suspect(placed.blamed)

    def add(self, replica: LiveReplica) -> None:
        self[replica.engine.replica_id] = replica
        replica.engine.adapters = replica.info.adapters
        self._changed()

    def set_models(self, replica: LiveReplica, names: ModelNames) -> None:
        """A replica in the table serves other names from now on."""
        replica.info = dataclasses.replace(replica.info, **names._asdict())
        replica.engine.adapters = names.adapters
        self._changed()

    def set_takes_ids(self, replica: LiveReplica, takes_ids: bool) -> None:
        """Completions may have token ids in place of their text from now on, or may not."""
        if replica.takes_ids != takes_ids:
            replica.takes_ids = takes_ids
            self._changed()

    def hold_back(self, replica_ids: frozenset[ReplicaId]) -> None:
        """Give new requests to none of these live replicas, and to all others."""
        self.held_back = replica_ids
        self._changed()

    def remove(self, replica_id: ReplicaId) -> None:
        del self[replica_id]
        self.held_back -= {replica_id}
        self._changed()

    def _changed(self) -> None:
        self.num_taking = self.num_able()
        self._of_model.clear()
        of_all = self.of_model(None)
        self.longest_prompt, self.one_model = of_all.longest_prompt, of_all.base_model != ""
        self.take_cache_salts = all(replica.engine.takes_cache_salt for replica in self.values())
        for listener in self._listeners:
            listener()
        if (change := self._next_change) is not None:
            self._next_change = None
            change.set_result(None)

    def num_able(self, without: Collection[LiveReplica] = ()) -> int:
        """Return how many could take new requests if these were gone. It does not look whether roles fit each other."""
        specs = [
            replica.info.spec
            for replica_id, replica in self.items()
            if replica_id not in self.held_back and replica not in without
        ]
        has_prefill = any(spec.role is Role.PREFILL for spec in specs)
        return sum(spec.role is not Role.PREFILL and (has_prefill or spec.answers_alone) for spec in specs)

    @property
    def lacks(self) -> str | None:
        """Why no replica takes requests; None if one does."""
        if self.num_taking:
            return None
        roles = {replica.info.spec.role for replica in self.values()}
        return NO_DECODE if roles == {Role.PREFILL} else NO_PREFILL if roles == {Role.DECODE} else "no replica is up"

    def next_change(self) -> asyncio.Future[None]:
        """Return what is done at the next change of the table. Others wait for it too: do not cancel it."""
        if self._next_change is None:
            self._next_change = asyncio.get_running_loop().create_future()
        return self._next_change

    def of_other_ranks(self, rank: bytes | None) -> frozenset[ReplicaId]:
        """Return the replicas that a client has ruled out by choosing a data-parallel rank itself; none without one.

        A choice that no server offers rules out nothing: the engine answers it.
        """
        if rank is None or not rank.isdigit():
            return frozenset()
        those = [replica.engine for replica in self.values() if replica.info.spec.role is not Role.PREFILL]
        others = frozenset(one.replica_id for one in those if one.rank not in (None, int(rank[:6])))
        return others if len(others) < len(those) else frozenset()

    def models(self) -> dict[str, LiveReplica]:
        """Return every model served now, each with a replica that serves it."""
        return {name: replica for replica in self.values() for name in replica.info.models}

    def _named_models(self) -> str:
        names = self.models()
        rest = len(names) - _SHOWN_MODELS
        return ", ".join(nsmallest(_SHOWN_MODELS, names)) + (f" and {rest} more: GET /v1/models" if rest > 0 else "")

    def check_model(self, model: str | None) -> ModelReplicas:
        """Do as `of_model`. Raises: NoReplicaError: no replica is up. UnknownModel: no live replica serves `model`."""
        if not self:
            raise NoReplicaError("no replica is up")
        return self.of_model(model)

    def of_model(self, model: str | None) -> ModelReplicas:
        """Return the replicas of a model; every replica serves None.

        Raises: UnknownModel: no live replica serves it, though there are some.
        """
        found = self._of_model.get(model)
        if found is None:
            others = frozenset(
                r for r, replica in self.items() if model is not None and model not in replica.info.models
            )
            if self and len(others) == len(self):
                raise UnknownModel(
                    f"no replica serves the model {str(model)[:200]!r}; there are: {self._named_models()}",
                    param="model",
                )
            found = ModelReplicas(model, self, others)
            if self:  # else clients would choose which names are kept
                self._of_model[model] = found
        return found

    def label(self, model: str | None) -> str:
        """Return the name of a model in metrics, "" if no live replica serves it: clients could name any."""
        try:
            return self.of_model(model).label
        except UnknownModel:
            return ""

    def able_to_serve(self, request: Request, model: str | None) -> frozenset[ReplicaId]:
        """Return the live replicas that answer requests for the model and can hold the prompt. Raises: UnknownModel."""
        unable = self.of_model(model).others | request.avoid | self.held_back
        length = request.num_prompt_tokens
        specs = {r: replica.info.spec for r, replica in self.items() if r not in unable}
        return frozenset(r for r, s in specs.items() if s.role is not Role.PREFILL and length <= longest_prompt(s))

    def with_base_model(self, info: EngineInfo) -> EngineInfo:
        """Return `info` with the replica's base model, named as on the live replicas that share one of its names."""
        names = [name for name in info.models if name not in info.adapters]
        same = (replica.info.spec.model for replica in self.values() if replica.info.spec.model in names)
        model = next(same, names[0] if names else "")
        return dataclasses.replace(info, spec=dataclasses.replace(info.spec, model=model))

    def engines_for(self, model: str | None) -> list[Engine]:
        """Return the clients of the live replicas that take requests for `model`. Raises: UnknownModel."""
        others = self.of_model(model).others | self.held_back
        return [replica.engine for replica_id, replica in self.items() if replica_id not in others]

    def engine(self, replica_id: ReplicaId) -> Engine:
        """Return a live replica's client. Raises: NoReplicaError: it is not live."""
        if replica_id not in self:
            raise NoReplicaError(f"replica {replica_id} is not live")
        return self[replica_id].engine

    def suspect(self, replica_id: ReplicaId) -> None:
        """Have a replica checked at once; nothing happens if it has left the rotation."""
        if (replica := self.get(replica_id)) is not None:
            replica.suspect.set()
