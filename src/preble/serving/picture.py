"""Everything that the live page shows, as one value: the fleet, its load and caches, what is hot, what was decided."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING

from msgspec import Struct

from preble import __version__
from preble.core.placing.snapshot import ReplicaState
from preble.core.types import ReplicaId, Role
from preble.decisions.recent import Decision
from preble.rules.ejection import Standing
from preble.serving.replicas.rows import MemberRow
from preble.serving.telemetry.numbers import Cell, Numbers, Reading, add
from preble.serving.telemetry.table import BY_NAME

if TYPE_CHECKING:
    from preble.serving.serving import Serving

_ITL = "preble_itl_seconds"
_NUM_PREFIXES = 24
_NUM_NAMING = 2_000
"""A prefix is named by one of this many last requests. More would find more names, and take longer than the few
milliseconds in which this process can do nothing else."""
_NUM_DECISIONS = 12
_NUM_CANDIDATES = 6
_NO_FAILURE = frozenset({"ok", "aborted", "rejected", "refused"})


class ReplicaPicture(Struct, frozen=True, omit_defaults=True):
    """One replica. `state`: as in `/replicas`; a live one may also be "ejected" or "probing". `models`: its names.

    Seconds and tokens are those of `ReplicaState`; `capacity` is None where the replica does not say it. `prompt`,
    `matched`: tokens of all prompts placed there so far, and those believed to be cached. `untrusted`: its
    cache counts for nothing. `estimated`: its cache is estimated, since its KV events do not arrive. `role`,
    `transfer_group`: see `ReplicaSpec`.
    """

    name: str
    state: str
    models: tuple[str, ...] = ()
    engine: str = ""
    error: str | None = None
    load_s: float = 0.0
    waiting_s: float = 0.0
    in_flight: int = 0
    cached: int = 0
    in_use: int = 0
    capacity: int | None = None
    prompt: float = 0.0
    matched: float = 0.0
    untrusted: bool = False
    estimated: bool = False
    role: Role = Role.MIXED
    transfer_group: str = ""


class PrefixRow(Struct, frozen=True):
    """One hot prefix, see `HotPrefix`. `holders`, `partly`: the replicas' names. `request_id`: of its last user."""

    name: str
    parent: int | None
    start: int
    end: int
    uses: int
    holders: tuple[str, ...]
    partly: tuple[str, ...]
    request_id: str


class Counts(Struct, frozen=True):
    """Numbers since the start: requests placed and failed, tokens, and the buckets of `ttft_bounds` and `itl_bounds`,
    each with its sum.
    """

    placed: float
    failed: float
    prompt: float
    matched: float
    cached: float
    output: float
    ttft: Cell
    itl: Cell


class Picture(Struct, frozen=True):
    """The gateway at one moment. `at`: Unix time. `up_s`: how long it has run. `window_s`: over which load and uses
    count. `queued`, `queued_s`: prompts that wait for their turn, and their GPU seconds."""

    at: float
    up_s: float
    version: str
    policy: str
    window_s: float
    ttft_bounds: tuple[float, ...]
    itl_bounds: tuple[float, ...]
    counts: Counts
    queued: int
    queued_s: float
    replicas: list[ReplicaPicture]
    prefixes: list[PrefixRow]
    decisions: list[Decision]


def take_picture(serving: Serving, others: Iterable[Iterable[Reading]], at: float, up_s: float) -> Picture:
    """Return the picture of this moment. `others`: the numbers of the front ends, which count gaps between tokens.

    O(replicas + prompts indexed + requests in the window).
    """
    numbers, state = serving.telemetry.numbers, serving.scheduler.snapshot()
    hot = serving.scheduler.hottest(_NUM_PREFIXES, serving.recent.placed(_NUM_NAMING))
    kinds = ("preble_prompt_tokens_total", "preble_matched_tokens_total")
    tokens = [numbers.sum_by("replica", kind) for kind in kinds]
    return Picture(
        at=at,
        up_s=round(up_s, 1),
        version=__version__,
        policy=serving.scheduler.policy.name,
        window_s=state.window_s,
        ttft_bounds=BY_NAME["preble_ttft_seconds"].bounds,
        itl_bounds=BY_NAME[_ITL].bounds,
        counts=_counts(numbers, others),
        queued=serving.num_waiting,
        queued_s=serving.waiting_s,
        replicas=[row for member in serving.members for row in _rows(serving, member, state.replicas, tokens)],
        prefixes=[PrefixRow(p.name, p.parent, p.start, p.end, p.uses, p.holders, p.partly, p.request_id) for p in hot],
        decisions=list(serving.recent.latest(_NUM_DECISIONS, _NUM_CANDIDATES)),
    )


def _counts(numbers: Numbers, others: Iterable[Iterable[Reading]]) -> Counts:
    def tokens(kind: str) -> float:
        return numbers.sum_by("", f"preble_{kind}_tokens_total")[""][0]

    ends, gaps = numbers.sum_by("outcome", "preble_finished_total"), numbers.sum_by("", _ITL)[""]
    for name, _, cell in chain.from_iterable(others):
        if name == _ITL:
            add(gaps, cell)
    return Counts(
        placed=numbers.sum_by("", "preble_placements_total")[""][0],
        failed=sum(cell[0] for outcome, cell in ends.items() if outcome not in _NO_FAILURE),
        prompt=tokens("prompt"),
        matched=tokens("matched"),
        cached=tokens("cached"),
        output=tokens("output"),
        ttft=numbers.sum_by("", "preble_ttft_seconds")[""],
        itl=gaps,
    )


def _rows(
    serving: Serving, member: MemberRow, states: Mapping[ReplicaId, ReplicaState], tokens: list[dict[str, Cell]]
) -> Iterator[ReplicaPicture]:
    """Yield one row, or one for each data-parallel rank. `tokens`: of prompts, and those matched, by replica."""
    live = [ReplicaId(name) for name in member.replicas if name in states and name in serving.replicas]
    for replica_id in live:
        prompt, matched = (of_kind.get(replica_id, [0.0])[0] for of_kind in tokens)
        yield _live_row(serving, member, replica_id, states[replica_id], prompt, matched)
    if not live:
        yield ReplicaPicture(member.url, member.state, error=member.last_error)


def _live_row(
    serving: Serving, member: MemberRow, replica_id: ReplicaId, state: ReplicaState, prompt: float, matched: float
) -> ReplicaPicture:
    replica, standing = serving.replicas[replica_id], serving.standing(replica_id)
    return ReplicaPicture(
        name=replica_id,
        state=member.state if member.state != "live" or standing is Standing.IN else standing,
        models=replica.info.models,
        engine=replica.info.engine,
        load_s=round(state.load_s, 3),
        waiting_s=round(state.waiting_prefill_s, 3),
        in_flight=state.num_requests,
        cached=state.cached_tokens,
        in_use=state.in_use_tokens,
        capacity=state.kv_capacity_tokens,
        prompt=prompt,
        matched=matched,
        untrusted=not state.trusted,
        estimated=replica.has_lost_events,
        role=replica.info.spec.role,
        transfer_group=replica.info.spec.transfer_group,
    )
