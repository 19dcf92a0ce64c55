"""The replicas: where each is, when it counts as up, and whether it is checked to be as predicted."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from preble.config.knobs import about


class ReplicaConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One replica. In a file either a table with these keys or just its URL."""

    url: Annotated[str, about("Base URL, without `/v1`.", why="there is no sensible default")]
    engine: Annotated[
        str | None,
        about("Its program, if it differs from the common `engine`.", why="most fleets are of one kind"),
    ] = None
    kv_events: Annotated[
        str | None,
        about("ZMQ address of its KV events, such as `tcp://10.0.0.5:5557`.", why="vLLM reports it itself"),
    ] = None
    kv_events_replay: Annotated[
        str | None, about("ZMQ address that replays past KV events.", why="vLLM reports it itself")
    ] = None
    kv_events_topic: Annotated[str, about("Topic of its KV events.", why="vLLM's own default")] = ""
    kv_store: Annotated[
        str,
        about(
            "A name for the store in which it shares KV blocks, the same for all replicas on that store.",
            why="replicas do not say which store they use",
        ),
    ] = ""


class HealthConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When a replica counts as down, and when as up again."""

    check_interval_s: Annotated[
        float,
        about(
            "Time between two readiness checks of a live replica.",
            unit="s",
            why="cheap, and broken connections show sooner",
            gt=0,
        ),
    ] = 5.0
    check_timeout_s: Annotated[
        float,
        about("Time for one check or probe.", unit="s", why="a busy engine can take seconds to answer /health", gt=0),
    ] = 10.0
    failures: Annotated[
        int, about("Failed checks in a row that take a replica out.", unit="checks", why="one may be chance", ge=1)
    ] = 2
    retry_min_s: Annotated[
        float,
        about(
            "First wait before a down replica is probed again.",
            unit="s",
            is_expert=True,
            why="a restart takes seconds",
            gt=0,
        ),
    ] = 0.5
    retry_max_s: Annotated[
        float,
        about(
            "Longest wait between two such probes.",
            unit="s",
            is_expert=True,
            why="a new replica is used within it",
            gt=0,
        ),
    ] = 5.0


class EjectionConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When a replica that is up but fails requests, answers nothing or is slow gets no more requests for a while.

    A replica is compared with those that serve the same models. After its time it is probed with one request at a time.
    """

    enabled: Annotated[
        bool, about("Keep requests away from such replicas.", why="one that fails fast looks idle and attracts traffic")
    ] = True
    consecutive_failures: Annotated[
        int,
        about(
            "Failed requests in a row that eject a replica; as many that wait in vain, for a replica that is silent.",
            unit="requests",
            why="two may be chance; each costs a client a retry",
            ge=1,
        ),
    ] = 3
    window_s: Annotated[
        float,
        about(
            "The time over which failures and waits are counted.",
            unit="s",
            is_expert=True,
            why="recent, and enough",
            gt=0,
        ),
    ] = 30.0
    min_requests: Annotated[
        int,
        about(
            "Requests of a replica within the window for a rate or a median to count.",
            unit="requests",
            is_expert=True,
            why="those of a few are chance",
            ge=1,
        ),
    ] = 10
    failure_rate: Annotated[
        float,
        about(
            "Share of failed requests that ejects a replica, if the others' is at most half of it.",
            is_expert=True,
            why="a retry hides a few failures",
            gt=0,
            le=1,
        ),
    ] = 0.3
    stall_s: Annotated[
        float,
        about(
            "Silence of a replica with streamed requests that ejects it and moves them, if others answer; at least "
            "four times the longest wait at the others.",
            unit="s",
            why="longer than nearly every prefill",
            gt=0,
        ),
    ] = 10.0
    slow_factor: Annotated[
        float,
        about(
            "How many times slower than the others' a replica's first bytes are if it is ejected for that; compared "
            "by what the cost profile expects.",
            is_expert=True,
            why="a queue alone makes a factor of a few",
            gt=1,
        ),
    ] = 10.0
    slow_min_s: Annotated[
        float,
        about(
            "No replica whose typical wait is shorter is slow.",
            unit="s",
            is_expert=True,
            why="users wait that long",
            ge=0,
        ),
    ] = 5.0
    largest_share: Annotated[
        float,
        about(
            "Of the replicas that serve the same models, the part that may be out at once.",
            why="where most fail, fewer replicas do not help",
            ge=0,
            le=1,
        ),
    ] = 0.5
    first_out_s: Annotated[
        float,
        about(
            "How long the first ejection lasts; doubled each time.",
            unit="s",
            is_expert=True,
            why="a hiccup is over",
            gt=0,
        ),
    ] = 5.0
    longest_out_s: Annotated[
        float,
        about(
            "Longest ejection; after as long without one the next is the first again.",
            unit="s",
            is_expert=True,
            why="one that was repaired is found within it",
            gt=0,
        ),
    ] = 300.0
    probes: Annotated[
        int,
        about(
            "Requests that must succeed, one after the other, to bring it back.",
            unit="requests",
            is_expert=True,
            why="one may be luck",
            ge=1,
        ),
    ] = 2
    longest_hold_s: Annotated[
        float,
        about(
            "Longest `Retry-After` of a replica that is honoured. Where no other replica is left, one request tries it"
            " every two seconds.",
            unit="s",
            why="a replica gone wild says days",
            ge=0,
        ),
    ] = 30.0


class RetryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How many requests may move to another replica after a failure, over the whole fleet.

    A request moves only before its client has got a byte. Beyond the budget the client gets the failure.
    """

    share: Annotated[
        float,
        about(
            "Of the requests in the window, the part that may be placed again.",
            why="a failing replica is ejected soon; more would multiply an outage",
            ge=0,
        ),
    ] = 0.2
    least: Annotated[
        int,
        about(
            "Retries in the window that are allowed however few requests there are.",
            unit="requests",
            is_expert=True,
            why="what runs on one replica may break at once",
            ge=0,
        ),
    ] = 100
    window_s: Annotated[float, about("The window.", unit="s", is_expert=True, why="recent, and enough", gt=0)] = 10.0


class ParityConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a replica computes the gateway's token ids, and caches what the gateway predicts.

    Checked after a replica has joined, without delaying it, and on demand: docs/howto/parity.md.
    """

    enabled: Annotated[
        bool,
        about(
            "Check each replica when it joins. Off: only on demand.",
            why="a wrong tokenizer or template costs every hit and shows nowhere else",
        ),
    ] = True
    distrust: Annotated[
        bool,
        about(
            "Ignore the cache of a replica whose token ids or cache differ from the prediction; off: only report it.",
            why="what is predicted there is wrong",
        ),
    ] = True
    blocks: Annotated[
        int,
        about(
            "Length of the prompt that is sent twice; at least 64 tokens.",
            unit="KV blocks",
            why="even, so that blocks of twice the size show; 64 tokens on most engines, milliseconds of a GPU",
            ge=2,
        ),
    ] = 4
    answer_s: Annotated[
        float,
        about(
            "Time for each check, with queueing in the replica.",
            unit="s",
            why="a replica that joins answers in milliseconds, a busy one queues for seconds",
            gt=0,
        ),
    ] = 60.0
    events_s: Annotated[
        float,
        about(
            "Time for the prompt's KV events to arrive.",
            unit="s",
            is_expert=True,
            why="they take milliseconds, catching up with a long past of the replica takes seconds",
            gt=0,
        ),
    ] = 30.0
    retry_s: Annotated[
        float,
        about(
            "Pause before an unverified replica is checked again; doubled each time, up to 64 times.",
            unit="s",
            why="the replica may have been busy or catching up",
            gt=0,
        ),
    ] = 60.0
