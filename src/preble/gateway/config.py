"""Configuration of the gateway: what can be set.

A knob is described once, by the `Annotated` type of its field: constraints, unit, meaning, and why the default is what
it is. The reference page is made from the same text (`preble.gateway.config_reference`). How a file, the environment
and flags become one `GatewayConfig`: `preble.gateway.config_load`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

from preble.core.policies import policy_names
from preble.core.rebalance import RebalanceSettings


def _about(text: str, *, why: str, unit: str = "", **limits: Any) -> Meta:
    return Meta(description=text, extra={"why": why, "unit": unit}, **limits)


class ReplicaConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One replica. In a file either a table with these keys or just its URL."""

    url: Annotated[str, _about("Base URL, without `/v1`.", why="there is no sensible default")]
    engine: Annotated[
        Literal["auto", "vllm", "sglang", "openai"] | None,
        _about("Its program, where it differs from the common `engine`.", why="most fleets are of one kind"),
    ] = None
    kv_events: Annotated[
        str | None,
        _about("ZMQ address of its KV events, such as `tcp://10.0.0.5:5557`.", why="vLLM tells it itself"),
    ] = None
    kv_events_replay: Annotated[
        str | None, _about("ZMQ address at which past KV events are asked for.", why="vLLM tells it itself")
    ] = None
    kv_events_topic: Annotated[str, _about("Topic of its KV events.", why="vLLM's own default")] = ""


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What one client, or all together, may ask for."""

    max_body_bytes: Annotated[
        int, _about("Largest request body.", unit="bytes", why="a million-token prompt of text is 4 to 6 MB", ge=1)
    ] = 16 * 1024 * 1024
    max_in_flight: Annotated[
        int,
        _about(
            "Prompts that are tokenized, waiting or running; one more is answered 429.",
            unit="prompts",
            why="far above what the engines run at once, far below what memory holds",
            ge=1,
        ),
    ] = 4096
    retry_after_s: Annotated[
        float, _about("`Retry-After` of a 429 or 503.", unit="s", why="about one long prefill", ge=0)
    ] = 1.0
    max_answer_bytes: Annotated[
        int,
        _about(
            "Largest answer of a replica that is not streamed; it is held in memory until it is whole.",
            unit="bytes",
            why="a million tokens of text with log probabilities; a replica gone wild must not fill the memory",
            ge=1,
        ),
    ] = 64 * 1024 * 1024


class TimeoutsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Upper bounds on every wait."""

    body_s: Annotated[
        float, _about("For the client to send its whole body.", unit="s", why="16 MiB over a slow uplink", gt=0)
    ] = 30.0
    connect_s: Annotated[
        float,
        _about("For a connection to a replica.", unit="s", why="three lost SYN packets (1 + 2 s) and a bit", gt=0),
    ] = 5.0
    first_byte_s: Annotated[
        float,
        _about(
            "For a replica's first byte, queueing included.", unit="s", why="a saturated replica queues minutes", gt=0
        ),
    ] = 600.0
    idle_s: Annotated[
        float,
        _about("Between two pieces of an answer.", unit="s", why="a preempted request waits for others to end", gt=0),
    ] = 300.0
    total_s: Annotated[
        float, _about("For a whole request.", unit="s", why="the longest answers stream for tens of minutes", gt=0)
    ] = 3600.0
    shutdown_s: Annotated[
        float,
        _about(
            "At shutdown, for running requests to end before they are aborted.",
            unit="s",
            why="Kubernetes kills after 30 s",
            ge=0,
        ),
    ] = 25.0


class HealthConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When a replica counts as down and when as up again."""

    check_interval_s: Annotated[
        float,
        _about(
            "Between two readiness checks of a live replica.",
            unit="s",
            why="cheap, and broken connections tell sooner",
            gt=0,
        ),
    ] = 5.0
    check_timeout_s: Annotated[
        float,
        _about("For one check or probe.", unit="s", why="a busy engine can take seconds to answer /health", gt=0),
    ] = 10.0
    failures: Annotated[
        int, _about("Failed checks in a row that take a replica out.", unit="checks", why="one may be chance", ge=1)
    ] = 2
    retry_min_s: Annotated[
        float,
        _about("First wait before a down replica is probed again.", unit="s", why="a restart takes seconds", gt=0),
    ] = 0.5
    retry_max_s: Annotated[
        float, _about("Longest wait between two such probes.", unit="s", why="a new replica is used within it", gt=0)
    ] = 5.0


class ParityConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a replica makes the token ids that the gateway makes, and caches what the gateway predicts.

    Checked after a replica has joined, without holding it up, and when asked: docs/howto/parity.md.
    """

    enabled: Annotated[
        bool,
        _about(
            "Check each replica when it joins. Off: only when asked.",
            why="a wrong tokenizer or template costs every hit and shows nowhere else",
        ),
    ] = True
    distrust: Annotated[
        bool,
        _about(
            "Count matches as none on a replica whose token ids or cache are not as predicted; off: only tell.",
            why="what is predicted there is wrong",
        ),
    ] = True
    blocks: Annotated[
        int,
        _about(
            "Length of the prompt that is sent twice; at least 64 tokens.",
            unit="KV blocks",
            why="even, so that blocks of twice the size show; 64 tokens on most engines, milliseconds of a GPU",
            ge=2,
        ),
    ] = 4
    answer_s: Annotated[
        float,
        _about(
            "For each of the checks, queueing in the replica included.",
            unit="s",
            why="a replica that joins answers in milliseconds, a busy one queues for seconds",
            gt=0,
        ),
    ] = 60.0
    events_s: Annotated[
        float,
        _about(
            "For the KV events of the prompt to arrive.",
            unit="s",
            why="they take milliseconds, catching up with a long past of the replica takes seconds",
            gt=0,
        ),
    ] = 30.0
    retry_s: Annotated[
        float,
        _about(
            "Until a replica that was not verified is checked again; doubled each time, up to 64 times as long.",
            unit="s",
            why="what was busy or catching up is not any more",
            gt=0,
        ),
    ] = 60.0


class TokenizerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How prompts become token ids."""

    inline_bytes: Annotated[
        int,
        _about(
            "Prompts up to this size are tokenized in the event loop where the fast tokenizer is in use.",
            unit="bytes",
            why="16 KiB take about 0.1 ms there, about what handing them to a thread costs",
            ge=0,
        ),
    ] = 16 * 1024
    workers: Annotated[
        int,
        _about(
            "Threads (fast tokenizer) or processes (`tokenizers`, which holds the interpreter's lock) for the others.",
            unit="workers",
            why="two keep a long prompt from delaying the short ones behind it",
            ge=1,
        ),
    ] = 2
    chat_template: Annotated[
        str | None,
        _about("File with a chat template to use instead of the model's.", why="give the same one as to the engines"),
    ] = None


class SchedulerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What the scheduler remembers and believes."""

    window_s: Annotated[
        float,
        _about(
            "H: the time over which a replica's load and a prefix's popularity are counted.",
            unit="s",
            why="the paper's three minutes",
            gt=0,
        ),
    ] = 180.0
    report_grace_s: Annotated[
        float,
        _about(
            "After a request's end, for the KV events of what it stored to arrive.",
            unit="s",
            why="they take milliseconds; a busy event loop may take longer",
            ge=0,
        ),
    ] = 1.0
    belief_ttl_s: Annotated[
        float,
        _about(
            "How long an unused prefix is believed to stay on a replica without KV events.",
            unit="s",
            why="what is asked for less often than that has mostly been evicted",
            gt=0,
        ),
    ] = 600.0
    index_budget_mib: Annotated[
        int,
        _about(
            "Memory of the prefix index. At the bound it forgets what was used least recently, then takes in no more.",
            unit="MiB",
            why="holds some 40 million tokens, the KV caches of dozens of GPUs",
            ge=1,
        ),
    ] = 256
    refit: Annotated[
        bool,
        _about(
            "Correct the cost profile from live requests, by a factor for prefill and one for decode.",
            why="a profile that is off by a factor of two is right after a minute or two (docs/decisions/0006)",
        ),
    ] = True


_REBALANCE = RebalanceSettings()


class RebalanceConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When the policies that rebalance, `e2` and `e2_rebalance`, move load: docs/decisions/0004. Others ignore it."""

    threshold: Annotated[
        float,
        _about(
            "Th_bal: how many times the lightest replica's load a replica must have to shed load.",
            why="the published code's",
            ge=1,
        ),
    ] = _REBALANCE.threshold
    calm: Annotated[
        float,
        _about("The ratio at which it stops; not above `threshold`.", why="lower, so that it does not flutter", ge=1),
    ] = _REBALANCE.calm
    queue_growth: Annotated[
        float,
        _about(
            "By which factor a prefix's queueing must grow from one half of the window to the next to be replicated.",
            why="the paper's: that it doubles",
            ge=1,
        ),
    ] = _REBALANCE.queue_growth
    min_requests: Annotated[
        int,
        _about(
            "Requests of a prefix in a half of the window for its mean queueing to count.",
            unit="requests",
            why="the mean of a few is chance",
            ge=1,
        ),
    ] = _REBALANCE.min_requests
    retire_below: Annotated[
        float,
        _about(
            "A further home is given up when the others would each get less than this part of the request rate at "
            "which the prefix was replicated.",
            why="half, so that it is not replicated again at once",
            ge=0,
        ),
    ] = _REBALANCE.retire_below
    interval_s: Annotated[
        float,
        _about(
            "Between two searches for what to replicate or retire.",
            unit="s",
            why="short against the window, rare against requests",
            gt=0,
        ),
    ] = _REBALANCE.interval_s


class DecisionsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept of placements to be asked for (`/debug`, `preble explain`) or replayed (`preble replay`)."""

    remembered: Annotated[
        int,
        _about(
            "Decisions kept in memory; fewer on a cluster of more than 25 replicas.",
            unit="decisions",
            why="minutes of a busy gateway in tens of MB",
            ge=1,
        ),
    ] = 10_000
    log: Annotated[
        str | None,
        _about(
            "File for the decision log, made anew at each start; the one before is kept as FILE.1. "
            "**It holds the token ids of every prompt.**",
            why="prompts are nobody's business unless somebody asks",
        ),
    ] = None
    log_tokens: Annotated[
        Literal["renamed", "plain"],
        _about(
            "`renamed`: token ids are exchanged by a secret permutation that is written nowhere, so that text cannot "
            "be looked up; the log replays all the same.",
            why="prompts need not be readable for a replay",
        ),
    ] = "renamed"
    log_max_mib: Annotated[
        int, _about("Size at which a log ends.", unit="MiB", why="a disk is not for logs alone", ge=1)
    ] = 1024


class AuthConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Who may ask, and as whom the gateway asks the replicas."""

    api_keys: Annotated[
        tuple[str, ...], _about("Keys of clients; empty lets everyone in.", why="as the engines themselves")
    ] = ()
    engine_api_key: Annotated[str | None, _about("Key sent to the replicas.", why="engines need none by default")] = (
        None
    )
    forward_authorization: Annotated[
        bool,
        _about(
            "Pass the client's `Authorization` on to the replicas.",
            why="a gateway's keys are not the engines' business",
        ),
    ] = False


class GatewayConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that can be set of one gateway."""

    replicas: Annotated[
        tuple[ReplicaConfig, ...],
        _about("The replicas: URLs, or tables with the keys below.", why="there is no sensible default"),
    ] = ()
    engine: Annotated[
        Literal["auto", "vllm", "sglang", "openai"],
        _about("The replicas' program; `auto` asks each.", why="asking is cheap and right"),
    ] = "auto"
    policy: Annotated[
        str,
        _about(
            f"How replicas are chosen: {', '.join(f'`{name}`' for name in policy_names())}.",
            why="first in our evaluation; `e2` is the paper's",
        ),
    ] = policy_names()[0]
    profile: Annotated[
        str | None,
        _about(
            "Cost profile, a shipped name or a file.",
            why="a middle-of-the-road GPU profile, which ranks replicas well enough",
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        _about(
            "The model's tokenizer: a folder, or a name on the hub.",
            why="without it the replicas' own `/tokenize` is asked",
        ),
    ] = None
    host: Annotated[str, _about("Address to listen on.", why="not open to the network unless asked for")] = "127.0.0.1"
    port: Annotated[
        int, _about("Port to listen on; 0 lets the system choose.", why="what engines and clients use", ge=0, le=65535)
    ] = 8000
    seed: Annotated[
        int,
        _about("Seed of the scheduler's random tie-breaks.", why="any will do; fixed, so runs can be repeated", ge=0),
    ] = 0
    limits: LimitsConfig = LimitsConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    health: HealthConfig = HealthConfig()
    parity: ParityConfig = ParityConfig()
    tokenizing: TokenizerConfig = TokenizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    rebalance: RebalanceConfig = RebalanceConfig()
    decisions: DecisionsConfig = DecisionsConfig()
    auth: AuthConfig = AuthConfig()


class Knob(Struct, frozen=True):
    """One thing that can be set. `key`: dotted, as in flags. `unit`: "" for none."""

    key: str
    type: Any
    default: Any
    unit: str
    text: str
    why: str


def knobs(struct: type[Struct] = GatewayConfig, prefix: str = "") -> Iterator[Knob]:
    """Every knob of `struct`, sections walked through, in the order of declaration."""
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, Struct):
            yield from knobs(hint, f"{prefix}{field.name}.")
            continue
        meta = next(m for m in get_args(hint) if isinstance(m, Meta))
        extra = meta.extra or {}
        yield Knob(prefix + field.name, hint, field.default, extra["unit"], meta.description or "", extra["why"])
