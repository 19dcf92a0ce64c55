"""The replicas: where each is, when it counts as up, and whether it is checked to be as predicted."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from preble.config.knobs import NotNegative, OneOrMore, Positive, ZeroOrMore
from preble.core.types import Role


class ReplicaConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One replica. In a file a table with these keys, or just its URL, as `URL,KEY=VALUE,...` if need be."""

    url: str
    """Base URL, without `/v1`. Why: there is no sensible default."""
    engine: str | None = None
    """Its program, if it differs from the common `engine`. Why: most fleets are of one kind."""
    kv_events: str | None = None
    """ZMQ address of its KV events, such as `tcp://10.0.0.5:5557`. Why: vLLM reports it itself."""
    kv_events_replay: str | None = None
    """ZMQ address that replays past KV events. Why: vLLM reports it itself."""
    kv_events_topic: str = ""
    """Topic of its KV events. Why: vLLM's own default."""
    kv_store: str = ""
    """A name for the store in which it shares KV blocks, the same for all replicas on that store. Why: replicas do not
    say which store they use."""
    kv_peer: str | None = None
    """`HOST:PORT` of its p2p tier, from which other replicas copy KV. Why: vLLM says it in its development mode only;
    docs/howto/copies.md."""
    role: Role | None = None
    """`prefill`, `decode` or `mixed`: what it is for. Why: SGLang says it itself; vLLM with NIXL can be either,
    and this fixes it there (docs/howto/splits.md)."""
    transfer_group: str = ""
    """A name for those among which KV may be sent, the same for all of them. Why: mostly all that run the same program,
    version, model and block size reach each other."""


class HealthConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When a replica counts as down, and when as up again."""

    check_interval_s: Positive = 5.0
    """[s] Time between two readiness checks of a live replica. Why: cheap, and broken connections show sooner."""
    check_timeout_s: Positive = 10.0
    """[s] Time for one check or probe. Why: a busy engine can take seconds to answer /health."""
    failures: OneOrMore = 2
    """[checks] Failed checks in a row that take a replica out. Why: one may be chance."""
    retry_min_s: Positive = 0.5
    """[s, expert] First wait before a down replica is probed again. Why: a restart takes seconds."""
    retry_max_s: Positive = 5.0
    """[s, expert] Longest wait between two such probes. Why: a new replica is used within it."""


class EjectionConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When a replica that is up but fails requests, answers nothing or is slow gets no more requests for a while.

    A replica is compared with those that serve the same models. After its time it is probed with one request at a time.
    """

    enabled: bool = True
    """Keep requests away from such replicas. Why: one that fails fast looks idle and attracts traffic."""
    consecutive_failures: OneOrMore = 3
    """[requests] Failed requests in a row that eject a replica; as many that wait in vain, for a replica that is
    silent. Why: two may be chance; each costs a client a retry."""
    window_s: Positive = 30.0
    """[s, expert] The time over which failures and waits are counted. Why: recent, and enough."""
    min_requests: OneOrMore = 10
    """[requests, expert] Requests of a replica within the window for a rate or a median to count. Why: those of a few
    are chance."""
    failure_rate: Annotated[float, Meta(gt=0, le=1)] = 0.3
    """[expert] Share of failed requests that ejects a replica, if the others' is at most half of it. Why: a retry hides
    a few failures."""
    stall_s: Positive = 10.0
    """[s] Silence of a replica with streamed requests that ejects it and moves them, if others answer; at least four
    times the longest wait at the others. Why: longer than nearly every prefill."""
    slow_factor: Annotated[float, Meta(gt=1)] = 10.0
    """[expert] How many times slower than the others' a replica's first bytes are if it is ejected for that; compared
    by what the cost profile expects. Why: a queue alone makes a factor of a few."""
    slow_min_s: NotNegative = 5.0
    """[s, expert] No replica whose typical wait is shorter is slow. Why: users wait that long."""
    largest_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Of the replicas that serve the same models, the part that may be out at once. Why: where most fail, fewer
    replicas do not help."""
    first_out_s: Positive = 5.0
    """[s, expert] How long the first ejection lasts; doubled each time. Why: a hiccup is over."""
    longest_out_s: Positive = 300.0
    """[s, expert] Longest ejection; after as long without one the next is the first again. Why: one that was repaired
    is found within it."""
    probes: OneOrMore = 2
    """[requests, expert] Requests that must succeed, one after the other, to bring it back. Why: one may be luck."""
    longest_hold_s: NotNegative = 30.0
    """[s] Longest `Retry-After` of a replica that is honoured. Where no other replica is left, one request tries it
    every two seconds. Why: a replica gone wild says days."""


class RetryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How many requests may move to another replica after a failure, over the whole fleet.

    A request moves only before its client has got a byte. Beyond the budget the client gets the failure.
    """

    share: NotNegative = 0.2
    """Of the requests in the window, the part that may be placed again. Why: a failing replica is ejected soon; more
    would multiply an outage."""
    least: ZeroOrMore = 100
    """[requests, expert] Retries in the window that are allowed however few requests there are. Why: what runs on one
    replica may break at once."""
    window_s: Positive = 10.0
    """[s, expert] The window. Why: recent, and enough."""


class ParityConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a replica computes the gateway's token ids, and caches what the gateway predicts.

    Checked after a replica has joined, without delaying it, and on demand: docs/howto/parity.md.
    """

    enabled: bool = True
    """Check each replica when it joins. Off: only on demand. Why: a wrong tokenizer or template costs every hit and
    shows nowhere else."""
    distrust: bool = True
    """Ignore the cache of a replica whose token ids or cache differ from the prediction; off: only report it. Why: what
    is predicted there is wrong."""
    blocks: Annotated[int, Meta(ge=2)] = 4
    """[KV blocks] Length of the prompt that is sent twice; at least 64 tokens. Why: even, so that blocks of twice the
    size show; 64 tokens on most engines, milliseconds of a GPU."""
    answer_s: Positive = 60.0
    """[s] Time for each check, with queueing in the replica. Why: a replica that joins answers in milliseconds, a busy
    one queues for seconds."""
    events_s: Positive = 30.0
    """[s, expert] Time for the prompt's KV events to arrive. Why: they take milliseconds, catching up with a long past
    of the replica takes seconds."""
    retry_s: Positive = 60.0
    """[s] Pause before an unverified replica is checked again; doubled each time, up to 64 times. Why: the replica may
    have been busy or catching up."""
