"""Values of the schedulers that are read from files and messages.

They are never compiled, so they have a file of their own: a compiled class does not keep the types of its fields, which
the reader needs (docs/decisions/0005). Everybody else takes them from `preble.core.types`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NewType

ReplicaId = NewType("ReplicaId", str)


class Role(StrEnum):
    """What a replica was started for."""

    MIXED = "mixed"
    """It computes prompts and decodes their answers."""
    PREFILL = "prefill"
    """It computes prompts, and sends their KV to a replica that decodes."""
    DECODE = "decode"
    """It decodes answers to prompts whose KV another replica sends it."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What the scheduler must know about a replica.

    `kv_capacity_tokens`: size of its KV cache, None where unknown (then nothing counts as evicted for lack of space).
    `max_prompt_tokens`: longest prompt it accepts, None where unknown.
    `block_size`: tokens per KV block; only whole blocks are cached.
    `reports_events`: its KV events will reach `on_stored` and `on_evicted`; without them its cache is estimated.
    `model`: the base model that it serves, "" for a replica that takes requests for any model.
    `store`: name of the store of KV blocks that it shares with other replicas, "" for none.
    `transfer_group`: name of the replicas that can copy KV from each other, "" for none. All of a group have one
    engine, model and block size, and reach each other. `splits`: whether one of its group may compute a prompt for it,
    and it for them. `role`: fixed when it was started; replicas with the roles of prefill and decode make pairs within
    their group, and copy nothing. `answers_alone`: whether it computes a prompt for which there is no pair, if its role
    is to decode.
    """

    replica_id: ReplicaId
    kv_capacity_tokens: int | None = None
    max_prompt_tokens: int | None = None
    block_size: int = 16
    reports_events: bool = False
    model: str = ""
    store: str = ""
    transfer_group: str = ""
    splits: bool = False
    role: Role = Role.MIXED
    answers_alone: bool = True


@dataclass(frozen=True, slots=True)
class Ways:
    """What a candidate's costs add up to for each way in which it could get the KV of the prompt; None where it cannot.

    `computed_s`: it computes all that its engine's memory lacks. `loaded_s`: it loads the rest of what it holds first;
    `copied_s`: it copies a prefix from another replica first; `split_s`: another one computes the prompt for it.
    """

    computed_s: float
    loaded_s: float | None = None
    copied_s: float | None = None
    split_s: float | None = None


@dataclass(slots=True, unsafe_hash=True)
class Candidate:
    """One replica as the policy saw it for one request. Costs are in seconds of GPU time. Made once and not changed.

    `matched_tokens`: leading prompt tokens that it is expected to serve from its cache; `loaded_tokens`: those of them
    that it must load from its host's memory or a store first, for which P has the time; `copied_tokens`: those that it
    would copy from another replica first, in `copy_s` seconds from the placement on. `score`: for a policy that does
    not compare L + M + P, what it compared, in its own unit, lower is better; None for the others. `own_wait_s`,
    `own_prefill_s`: for a policy whose costs are weighted delays, the seconds for which this request alone was expected
    to wait there, and then to be computed; None for the others. `ways`: by the way in which it could get the KV; None
    where no replica can but by computing it.
    """

    replica_id: ReplicaId
    matched_tokens: int
    load_s: float = 0.0
    eviction_s: float = 0.0
    prefill_s: float = 0.0
    score: float | None = None
    loaded_tokens: int = 0
    own_wait_s: float | None = None
    own_prefill_s: float | None = None
    copied_tokens: int = 0
    copy_s: float = 0.0
    ways: Ways | None = None

    @property
    def cost_s(self) -> float:
        return self.load_s + self.eviction_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class Target:
    """How fast an answer is to be. `ttft_s`: seconds from its arrival to the first token; `tpot_s`: between two tokens.
    None: as it comes."""

    ttft_s: float | None = None
    tpot_s: float | None = None


NO_TARGET: Final = Target()


@dataclass(frozen=True, slots=True)
class LearnedLength:
    """How long the answers to one prefix are: `output_tokens` in `answers`.

    `digest`: of its namespace and its token ids, so that nobody can read the prompt. `end`: how many tokens it has.
    """

    digest: str
    end: int
    answers: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class Learned:
    """What a scheduler has learned from its requests, for a later one to begin with.

    `prefill_factor`, `decode_factor`: by which the times of its cost profile are multiplied. `answer_tokens`: the mean
    length of an answer, None if nothing is known. `lengths`: by prefix, the shorter ones first.
    """

    prefill_factor: float = 1.0
    decode_factor: float = 1.0
    answer_tokens: float | None = None
    lengths: tuple[LearnedLength, ...] = ()


NOTHING_LEARNED: Final = Learned()
