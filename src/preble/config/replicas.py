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
        about("Its program, where it differs from the common `engine`.", why="most fleets are of one kind"),
    ] = None
    kv_events: Annotated[
        str | None,
        about("ZMQ address of its KV events, such as `tcp://10.0.0.5:5557`.", why="vLLM tells it itself"),
    ] = None
    kv_events_replay: Annotated[
        str | None, about("ZMQ address at which past KV events are asked for.", why="vLLM tells it itself")
    ] = None
    kv_events_topic: Annotated[str, about("Topic of its KV events.", why="vLLM's own default")] = ""


class HealthConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When a replica counts as down and when as up again."""

    check_interval_s: Annotated[
        float,
        about(
            "Between two readiness checks of a live replica.",
            unit="s",
            why="cheap, and broken connections tell sooner",
            gt=0,
        ),
    ] = 5.0
    check_timeout_s: Annotated[
        float,
        about("For one check or probe.", unit="s", why="a busy engine can take seconds to answer /health", gt=0),
    ] = 10.0
    failures: Annotated[
        int, about("Failed checks in a row that take a replica out.", unit="checks", why="one may be chance", ge=1)
    ] = 2
    retry_min_s: Annotated[
        float,
        about("First wait before a down replica is probed again.", unit="s", why="a restart takes seconds", gt=0),
    ] = 0.5
    retry_max_s: Annotated[
        float, about("Longest wait between two such probes.", unit="s", why="a new replica is used within it", gt=0)
    ] = 5.0


class ParityConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a replica makes the token ids that the gateway makes, and caches what the gateway predicts.

    Checked after a replica has joined, without holding it up, and when asked: docs/howto/parity.md.
    """

    enabled: Annotated[
        bool,
        about(
            "Check each replica when it joins. Off: only when asked.",
            why="a wrong tokenizer or template costs every hit and shows nowhere else",
        ),
    ] = True
    distrust: Annotated[
        bool,
        about(
            "Count matches as none on a replica whose token ids or cache are not as predicted; off: only tell.",
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
            "For each of the checks, queueing in the replica included.",
            unit="s",
            why="a replica that joins answers in milliseconds, a busy one queues for seconds",
            gt=0,
        ),
    ] = 60.0
    events_s: Annotated[
        float,
        about(
            "For the KV events of the prompt to arrive.",
            unit="s",
            why="they take milliseconds, catching up with a long past of the replica takes seconds",
            gt=0,
        ),
    ] = 30.0
    retry_s: Annotated[
        float,
        about(
            "Until a replica that was not verified is checked again; doubled each time, up to 64 times as long.",
            unit="s",
            why="what was busy or catching up is not any more",
            gt=0,
        ),
    ] = 60.0
