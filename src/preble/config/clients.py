"""What clients may ask for, how long anything may take, and who may ask at all."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from preble.config.knobs import about
from preble.core.admission.admission import DEPTH_S


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on what one client, or all together, may send."""

    max_body_bytes: Annotated[
        int, about("Largest request body in JSON.", unit="bytes", why="a chat with a dozen photos", ge=1)
    ] = 64 * 1024 * 1024
    max_upload_bytes: Annotated[
        int,
        about(
            "Largest request body that is not JSON, such as a sound file; the replica gets it as it comes.",
            unit="bytes",
            why="hours of speech",
            ge=1,
        ),
    ] = 1024 * 1024 * 1024
    max_in_flight: Annotated[
        int,
        about(
            "Prompts that are tokenized, waiting or running, each counted as often as it is answered; further ones "
            "get a 429.",
            unit="prompts",
            why="far above what the engines run at once, far below what memory holds",
            ge=1,
        ),
    ] = 4096
    max_prompts: Annotated[
        int,
        about(
            "Prompts in one request; several answers to each count as so many prompts.",
            unit="prompts",
            why="batches of evaluations; `prompts_at_once` bounds the work",
            ge=1,
        ),
    ] = 1024
    max_answers: Annotated[
        int,
        about("Answers to one prompt: `n`.", unit="answers", why="an engine may run all of them at once", ge=1),
    ] = 128
    prompts_at_once: Annotated[
        int,
        about(
            "The most prompts of one request that are tokenized, waiting or running at once.",
            unit="prompts",
            why="enough to fill a replica, and other requests get their turn",
            ge=1,
        ),
    ] = 16
    retry_after_s: Annotated[
        float, about("`Retry-After` of a 429 or 503.", unit="s", is_expert=True, why="about one long prefill", ge=0)
    ] = 1.0
    max_answer_bytes: Annotated[
        int,
        about(
            "Largest answer that is not streamed; the gateway keeps it in memory until it is complete.",
            unit="bytes",
            why="a million tokens of text with log probabilities; a broken replica must not fill the memory",
            ge=1,
        ),
    ] = 64 * 1024 * 1024


class QueueConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How requests of several tenants take turns when the fleet is busy. Requests without a key are placed at once."""

    enabled: Annotated[bool, about("Let tenants take turns.", why="one greedy tenant would stop all others")] = True
    depth_s: Annotated[
        float,
        about(
            "Prefill of one tenant that may wait inside each replica; the gateway queues the rest. While several "
            "tenants ask, none waits there for another.",
            unit="s",
            why="a few iterations: enough to keep a replica busy, and short to wait behind",
            gt=0,
        ),
    ] = DEPTH_S
    max_wait_s: Annotated[
        float,
        about(
            "Longest wait for a turn; a request that cannot make it gets a 429 at once. `x-preble-max-wait` sets a "
            "shorter one for a request.",
            unit="s",
            why="users have left by then",
            gt=0,
        ),
    ] = 60.0
    credit_s: Annotated[
        float,
        about(
            "GPU time that a tenant may catch up after it used less than it could have.",
            unit="s",
            why="a few long prompts",
            ge=0,
        ),
    ] = 2.0
    classes: Annotated[
        tuple[str, ...],
        about(
            "Classes of priority, the first is served first. A request names one in the header `x-preble-priority` or "
            "the field `service_tier`; without, it belongs to its key's, and that to the first.",
            why="people before batches",
        ),
    ] = ("interactive", "batch")


class TimeoutsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on every wait."""

    body_s: Annotated[
        float, about("Time for the client to send its whole body.", unit="s", why="16 MiB over a slow uplink", gt=0)
    ] = 30.0
    no_replica_wait_s: Annotated[
        float,
        about(
            "How long a request waits while no replica takes requests; then it gets a 503. 0: not at all.",
            unit="s",
            why="a small fleet restarts as a whole; clients' own retries last a few seconds",
            ge=0,
        ),
    ] = 30.0
    connect_s: Annotated[
        float,
        about(
            "Time to connect to a replica.",
            unit="s",
            is_expert=True,
            why="three lost SYN packets (1 + 2 s) and a bit",
            gt=0,
        ),
    ] = 5.0
    first_byte_s: Annotated[
        float,
        about(
            "Time until a replica's first byte, with queueing.",
            unit="s",
            why="a saturated replica queues minutes",
            gt=0,
        ),
    ] = 600.0
    idle_s: Annotated[
        float,
        about(
            "Longest pause between two pieces of an answer.",
            unit="s",
            why="a preempted request waits for others to end",
            gt=0,
        ),
    ] = 300.0
    total_s: Annotated[
        float, about("Time for a whole request.", unit="s", why="the longest answers stream for tens of minutes", gt=0)
    ] = 3600.0
    drain_s: Annotated[
        float,
        about(
            "After SIGTERM, for load balancers to notice: `/ready` says 503 and answers say `connection: close`, but "
            "everything is still served. Then `shutdown_s` begins.",
            unit="s",
            why="a readiness probe or two; with `shutdown_s` below the 30 s after which Kubernetes kills",
            ge=0,
        ),
    ] = 4.0
    shutdown_s: Annotated[
        float,
        about(
            "At shutdown, for running requests to end before they are aborted.",
            unit="s",
            why="Kubernetes kills after 30 s",
            ge=0,
        ),
    ] = 25.0


class AuthConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """API keys: those of clients, and the gateway's own for the replicas."""

    api_keys: Annotated[
        tuple[str, ...],
        about(
            "Keys of clients, each a tenant of its own: the key, or `NAME=sha256:HASH`. Without any key, here or "
            "below, everyone may ask.",
            why="like the engines themselves",
        ),
    ] = ()
    admin_keys: Annotated[
        tuple[str, ...],
        about(
            "Keys that may also use `/debug` and see where requests were placed. If there are keys, others may not.",
            why="both show what others send",
        ),
    ] = ()
    keys_file: Annotated[
        str | None,
        about(
            "TOML file with named keys, their tenants and limits (docs/howto/tenants.md); read again when it changes.",
            why="most gateways have one tenant",
        ),
    ] = None
    metrics_need_key: Annotated[
        bool, about("Where there are keys, ask for an admin key for `/metrics` too.", why="it names keys and replicas")
    ] = True
    engine_api_key: Annotated[str | None, about("Key sent to the replicas.", why="engines need none by default")] = None
    forward_authorization: Annotated[
        bool,
        about(
            "Pass the client's `Authorization` on to the replicas.",
            why="a gateway's keys are not the engines' business",
        ),
    ] = False


class BrowsersConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Pages that ask from a browser (CORS)."""

    origins: Annotated[
        tuple[str, ...],
        about(
            "Origins whose pages may ask and read the answers at the paths of clients, such as "
            "`https://chat.example.com`; `*`: every page.",
            why="few gateways are asked by a page, and a page may come from anywhere",
        ),
    ] = ()
    hosts: Annotated[
        tuple[str, ...],
        about(
            "Names under which operators' pages and pages in a browser may ask a gateway without keys, besides its "
            "addresses and names that nobody can register (docs/howto/network.md).",
            why="a page's own name may lead to this machine (DNS rebinding)",
        ),
    ] = ()
