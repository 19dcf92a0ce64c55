"""What clients may ask for, how long anything may take, and who may ask at all."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from preble.config.knobs import NotNegative, OneOrMore, Positive
from preble.core.admission.admission import DEPTH_S

Milliseconds = Annotated[float, Meta(gt=0, le=1e9)]


class TargetsConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What requests of a key, or for a model, ask for if they name no target, and the shortest that they may name."""

    ttft_ms: Milliseconds | None = None
    """[ms] Time to the first token, of requests that name none. Why: without a target nothing is refused for it."""
    tpot_ms: Milliseconds | None = None
    """[ms] Time between two tokens, of requests that name none. Why: as `ttft_ms`."""
    least_ttft_ms: Milliseconds | None = None
    """[ms] The shortest time to the first token; a shorter one counts as this. Why: only an operator knows what the
    fleet can do."""
    least_tpot_ms: Milliseconds | None = None
    """[ms] The shortest time between two tokens; a shorter one counts as this. Why: as `least_ttft_ms`."""


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on what one client, or all together, may send."""

    max_body_bytes: OneOrMore = 64 * 1024 * 1024
    """[bytes] Largest request body in JSON. Why: a chat with a dozen photos."""
    max_upload_bytes: OneOrMore = 1024 * 1024 * 1024
    """[bytes] Largest request body that is not JSON, such as a sound file; the replica gets it as it comes. Why: hours
    of speech."""
    max_in_flight: OneOrMore = 4096
    """[prompts] Prompts that are tokenized, waiting or running, each counted as often as it is answered; further ones
    get a 429. Why: far above what the engines run at once, far below what memory holds."""
    max_prompts: OneOrMore = 1024
    """[prompts] Prompts in one request; several answers to each count as so many prompts. Why: batches of evaluations;
    `prompts_at_once` bounds the work."""
    max_answers: OneOrMore = 128
    """[answers] Answers to one prompt: `n`. Why: an engine may run all of them at once."""
    prompts_at_once: OneOrMore = 16
    """[prompts] The most prompts of one request that are tokenized, waiting or running at once. Why: enough to fill a
    replica, and other requests get their turn."""
    retry_after_s: NotNegative = 1.0
    """[s, expert] `Retry-After` of a 429 or 503. Why: about one long prefill."""
    max_answer_bytes: OneOrMore = 64 * 1024 * 1024
    """[bytes] Largest answer that is not streamed, and the most of a stream before its first token: the gateway keeps
    both in memory. Why: a million tokens of text with log probabilities; a broken replica must not fill the memory."""


class QueueConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How requests of several tenants take turns when the fleet is busy. Requests without a key are placed at once."""

    enabled: bool = True
    """Let tenants take turns. Why: one greedy tenant would stop all others."""
    depth_s: Positive = DEPTH_S
    """[s] Prefill of one tenant that may wait inside each replica; the gateway queues the rest. While several tenants
    ask, none waits there for another. Why: a few iterations: enough to keep a replica busy, and short to wait
    behind."""
    max_wait_s: Positive = 60.0
    """[s] Longest wait for a turn; a request that cannot make it gets a 429 at once. `x-preble-max-wait` sets a shorter
    one for a request. Why: users have left by then."""
    credit_s: NotNegative = 2.0
    """[s] GPU time that a tenant may catch up after it used less than it could have. Why: a few long prompts."""
    classes: tuple[str, ...] = ("interactive", "batch")
    """Classes of priority, the first is served first. A request names one in the header `x-preble-priority` or the
    field `service_tier`; without, it belongs to its key's, and that to the first. Why: people before batches."""


class TimeoutsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on every wait."""

    body_s: Positive = 30.0
    """[s] Time for the client to send its whole body. Why: 16 MiB over a slow uplink."""
    no_replica_wait_s: NotNegative = 30.0
    """[s] How long a request waits while no replica takes requests; then it gets a 503. 0: not at all. Why: a small
    fleet restarts as a whole; clients' own retries last a few seconds."""
    connect_s: Positive = 5.0
    """[s, expert] Time to connect to a replica. Why: three lost SYN packets (1 + 2 s) and a bit."""
    first_byte_s: Positive = 600.0
    """[s] Time until a replica's first byte, with queueing. Why: a saturated replica queues minutes."""
    idle_s: Positive = 300.0
    """[s] Longest pause between two pieces of an answer. Why: a preempted request waits for others to end."""
    total_s: Positive = 3600.0
    """[s] Time for a whole request. Why: the longest answers stream for tens of minutes."""
    drain_s: NotNegative = 4.0
    """[s] After SIGTERM, for load balancers to notice: `/ready` says 503 and answers say `connection: close`, but
    everything is still served. Then `shutdown_s` begins. Why: a readiness probe or two; with `shutdown_s` below the 30
    s after which Kubernetes kills."""
    shutdown_s: NotNegative = 25.0
    """[s] At shutdown, for running requests to end before they are aborted. Why: Kubernetes kills after 30 s."""


class AuthConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """API keys: those of clients, and the gateway's own for the replicas."""

    api_keys: tuple[str, ...] = ()
    """Keys of clients, each a tenant of its own: the key, or `NAME=sha256:HASH`. Without any key, here or below,
    everyone may ask. Why: like the engines themselves."""
    admin_keys: tuple[str, ...] = ()
    """Keys that may also use `/debug` and see where requests were placed. If there are keys, others may not. Why: both
    show what others send."""
    keys_file: str | None = None
    """TOML file with named keys, their tenants and limits (docs/howto/tenants.md); read again when it changes. Why:
    most gateways have one tenant."""
    metrics_need_key: bool = True
    """Where there are keys, ask for an admin key for `/metrics` too. Why: it names keys and replicas."""
    engine_api_key: str | None = None
    """Key sent to the replicas. Why: engines need none by default."""
    forward_authorization: bool = False
    """Pass the client's `Authorization` on to the replicas. Why: a gateway's keys are not the engines' business."""


class BrowsersConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Pages that ask from a browser (CORS)."""

    origins: tuple[str, ...] = ()
    """Origins whose pages may ask and read the answers at the paths of clients, such as `https://chat.example.com`;
    `*`: every page. Why: few gateways are asked by a page, and a page may come from anywhere."""
    hosts: tuple[str, ...] = ()
    """Names under which operators' pages and pages in a browser may ask a gateway without keys, besides its addresses
    and names that nobody can register (docs/howto/network.md). Why: a page's own name may lead to this machine (DNS
    rebinding)."""
