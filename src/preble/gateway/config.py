"""Configuration of the gateway: what can be set, and how a file, the environment and flags become one `GatewayConfig`.

Layers, later ones win: the defaults here, one TOML file, environment variables (`PREBLE_PORT`,
`PREBLE_LIMITS__MAX_IN_FLIGHT`), then command-line flags (`port`, `limits.max_in_flight`). A knob is described once, by
the `Annotated` type of its field: constraints, unit, meaning, and why the default is what it is. The reference page is
made from the same text (`preble.gateway.config_reference`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from preble.errors import ConfigError

ENV_PREFIX = "PREBLE_"


def _about(text: str, *, why: str, unit: str = "", **limits: Any) -> Meta:
    return Meta(description=text, extra={"why": why, "unit": unit}, **limits)


class ReplicaConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One replica. In a file either a table with these keys or just its URL."""

    url: Annotated[str, _about("Base URL, without `/v1`.", why="there is no sensible default")]
    engine: Annotated[
        Literal["auto", "vllm", "openai"] | None,
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
        Literal["auto", "vllm", "openai"],
        _about("The replicas' program; `auto` asks each.", why="asking is cheap and right"),
    ] = "auto"
    policy: Annotated[
        str, _about("How replicas are chosen: `e2`, `round_robin` or `least_load`.", why="the paper's")
    ] = "e2"
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
    tokenizing: TokenizerConfig = TokenizerConfig()
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


def load(path: str | Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> GatewayConfig:
    """The configuration from a TOML file (None for no file), the environment and flags, each overriding the one before.

    `flags`: dotted knob names to values; a None or an empty tuple or list means "not given".

    Raises: ConfigError: an unreadable file, an unknown key, a wrong value; names the place and what to do.
    """
    known = {knob.key: knob for knob in knobs()}
    given = {key: value for key, value in flags.items() if value is not None and value != () and value != []}
    merged: dict[str, Any] = {}
    for where, layer, strict in (
        (str(path), _file_layer(path, known), True),
        ("environment", _environment_layer(environ, known), False),
        ("flags", given, True),
    ):
        for key, value in layer.items():
            merged[key] = _checked(where, key, value, known, strict=strict)
    config = msgspec.convert(_nested(merged), GatewayConfig, from_attributes=True)
    _check_whole(config)
    return config


def _file_layer(path: str | Path | None, known: Mapping[str, Knob]) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {str(path)!r} cannot be read: {error}") from error
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration file {str(path)!r} is not valid TOML: {error}") from error
    return dict(_flattened(tree, known))


def _flattened(tree: Mapping[str, Any], known: Mapping[str, Knob], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a TOML tree; a table that is no section is left whole, as an unknown key to complain of."""
    sections = {key.rpartition(".")[0] for key in known if "." in key}
    for name, value in tree.items():
        key = prefix + name
        if isinstance(value, Mapping) and key in sections:
            yield from _flattened(value, known, f"{key}.")
        else:
            yield key, value


def _environment_layer(environ: Mapping[str, str], known: Mapping[str, Knob]) -> dict[str, Any]:
    """Knobs set by `PREBLE_*`. Other variables with that prefix are not ours, unless they look like a typing error."""
    variables = {ENV_PREFIX + key.upper().replace(".", "__"): knob for key, knob in known.items()}
    layer: dict[str, Any] = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        knob = variables.get(variable)
        if knob is not None:
            layer[knob.key] = _split(value) if knob.key in ("replicas", "auth.api_keys") else value
        elif near := get_close_matches(variable, variables, n=1, cutoff=0.9):
            raise ConfigError(f"environment variable {variable} is not known; did you mean {near[0]}?")
    return layer


def _split(value: str) -> list[str]:
    return [part for part in (piece.strip() for piece in value.split(",")) if part]


def _checked(where: str, key: str, value: Any, known: Mapping[str, Knob], *, strict: bool) -> Any:
    knob = known.get(key)
    if knob is None:
        raise ConfigError(f"{where}: unknown key {key!r}; {_hint(key, known)}")
    if key == "replicas":
        return _replicas(where, value)
    try:
        return msgspec.convert(value, knob.type, strict=strict)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {key} = {value!r}: {error}") from error


def _hint(key: str, known: Mapping[str, Any]) -> str:
    near = get_close_matches(key, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"


def _replicas(where: str, value: Any) -> tuple[ReplicaConfig, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise ConfigError(f"{where}: replicas = {value!r}: give a list of URLs or of tables with a `url`")
    return tuple(_replica(where, item) for item in value)


def _replica(where: str, item: Any) -> ReplicaConfig:
    if isinstance(item, ReplicaConfig):
        table: dict[str, Any] = msgspec.structs.asdict(item)
    else:
        table = {"url": item} if isinstance(item, str) else item
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: replicas: {item!r} is neither a URL nor a table with a `url`")
    names = [field.name for field in msgspec.structs.fields(ReplicaConfig)]
    for key in table:
        if key not in names:
            raise ConfigError(f"{where}: replicas: unknown key {key!r}; {_hint(key, dict.fromkeys(names))}")
    try:
        replica = msgspec.convert(dict(table), ReplicaConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: replicas: {item!r}: {error}") from error
    return msgspec.structs.replace(replica, url=_base_url(where, replica.url))


def _base_url(where: str, url: str) -> str:
    """The URL without a trailing slash or `/v1`. Raises: ConfigError."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"{where}: replica URL {url!r} is not usable; give one such as http://127.0.0.1:8101")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return tree


def _check_whole(config: GatewayConfig) -> None:
    """What only the whole can tell. Raises: ConfigError."""
    if not config.replicas:
        raise ConfigError("no replica given: name at least one, such as --replica http://127.0.0.1:8101")
    urls = [replica.url for replica in config.replicas]
    if twice := next((url for url in urls if urls.count(url) > 1), None):
        raise ConfigError(f"replica {twice} is given twice; name each replica once")
    if config.health.retry_min_s > config.health.retry_max_s:
        raise ConfigError("health.retry_min_s is larger than health.retry_max_s; make it the smaller one")
