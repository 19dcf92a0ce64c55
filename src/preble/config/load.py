"""How a file, the environment and flags become one `GatewayConfig`.

Layers, later ones win: the defaults, one TOML file, environment variables (`PREBLE_PORT`,
`PREBLE_LIMITS__MAX_IN_FLIGHT`), then command-line flags (`port`, `limits.max_in_flight`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from preble.config import GatewayConfig, GroupConfig, Knob, ReplicaConfig, knobs
from preble.errors import ConfigError
from preble.plugins.policies import make_policy
from preble.web.urls import server_url

ENV_PREFIX = "PREBLE_"
_LISTS = (
    "replicas",
    "peers.servers",
    "auth.api_keys",
    "auth.admin_keys",
    "browsers.origins",
    "browsers.hosts",
    "queue.classes",
)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@*A-Z]+")
"""As a browser sends it."""


@dataclass(frozen=True, slots=True)
class ConfigSources:
    """Where a configuration comes from, so that it can be read again. See `load`."""

    path: Path | None
    environ: Mapping[str, str]
    flags: Mapping[str, Any]

    def load(self) -> GatewayConfig:
        """Raises: ConfigError."""
        return load(self.path, self.environ, self.flags)


def load(path: str | Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> GatewayConfig:
    """Return the configuration from a TOML file (None for no file), the environment and flags, each overriding the one
    before.

    `flags`: dotted knob names to values; a None or an empty tuple or list means "not given".

    Raises: ConfigError: an unreadable file, an unknown key, a wrong value; names the place and what to do.
    """
    known = {knob.key: knob for knob in knobs(GatewayConfig)}
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


def changed_settings(old: GatewayConfig, new: GatewayConfig) -> list[str]:
    """Return the dotted keys of the settings that differ."""

    def value(config: Any, key: str) -> Any:
        for name in key.split("."):
            config = getattr(config, name)
        return config

    return [knob.key for knob in knobs(GatewayConfig) if value(old, knob.key) != value(new, knob.key)]


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
        last = f"at line {text.count(chr(10)) + 1}, the last"
        reason = str(error).replace("at end of document", last)  # a missing value or quote; Python names no line
        raise ConfigError(f"configuration file {str(path)!r} is not valid TOML: {reason}") from error
    except RecursionError:
        raise ConfigError(f"configuration file {str(path)!r} is not valid TOML: it is nested too deep") from None
    return dict(_flattened(tree, known))


def _flattened(tree: Mapping[str, Any], known: Mapping[str, Knob], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys of a TOML tree; a table that is no section is left whole and reported as an unknown key."""
    sections = _sections(known)
    for name, value in tree.items():
        key = prefix + name
        if isinstance(value, Mapping) and key in sections:
            yield from _flattened(value, known, f"{key}.")
        else:
            yield key, value


def _environment_layer(environ: Mapping[str, str], known: Mapping[str, Knob]) -> dict[str, Any]:
    """Return knobs set by `PREBLE_*`. Other variables with that prefix are ignored, unless they look like a typo."""
    variables = {ENV_PREFIX + key.upper().replace(".", "__"): knob for key, knob in known.items()}
    layer: dict[str, Any] = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        knob = variables.get(variable)
        if knob is not None:
            layer[knob.key] = [*_listed(value, knob)] if knob.key in _LISTS else value
        elif near := get_close_matches(variable, variables, n=1, cutoff=0.9):
            raise ConfigError(f"environment variable {variable} is not known; did you mean {near[0]}?")
    return layer


def _listed(value: str, knob: Knob) -> Iterator[str]:
    """Yield the parts between commas; what follows a replica's URL as `,KEY=VALUE` belongs to it."""
    between = r",(?!\w+=)" if knob.key == "replicas" else ","
    return (part for piece in re.split(between, value) if (part := piece.strip()))


def _checked(where: str, key: str, value: Any, known: Mapping[str, Knob], *, strict: bool) -> Any:
    knob = known.get(key)
    if knob is None and isinstance(value, Mapping):
        raise ConfigError(f"{where}: unknown section [{key}]; {_section_hint(key, known)}")
    if knob is None:
        raise ConfigError(f"{where}: unknown key {key!r}; {_hint(key, known)}")
    if key == "replicas":
        return _replicas(where, value)
    if key == "groups":
        return _groups(where, value)
    try:
        return msgspec.convert(value, knob.type, strict=strict)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {key} = {value!r}: {error}") from error


def _hint(key: str, known: Mapping[str, Any]) -> str:
    near = get_close_matches(key, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"


def _section_hint(section: str, known: Mapping[str, Any]) -> str:
    sections = _sections(known)
    if near := get_close_matches(section, sections, n=1, cutoff=0.7):
        return f"did you mean [{near[0]}]?"
    top = sorted(key for key in known if "." not in key)
    return f"sections: {', '.join(sorted(sections))}; before the first of them: {', '.join(top)}"


def _sections(known: Mapping[str, Any]) -> set[str]:
    return {key.rpartition(".")[0] for key in known if "." in key}


def _replicas(where: str, value: Any) -> tuple[ReplicaConfig, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise ConfigError(f"{where}: replicas = {value!r}: give a list of URLs or of tables with a `url`")
    return tuple(replica_of(where, item) for item in value)


def replica_of(where: str, item: Any) -> ReplicaConfig:
    """Return the replica that a URL or a table describes. `where`: what errors begin with. Raises: ConfigError.

    >>> replica_of("flags", "http://a:1,role=prefill").role
    <Role.PREFILL: 'prefill'>
    """
    if isinstance(item, ReplicaConfig):
        table: dict[str, Any] = msgspec.structs.asdict(item)
    elif isinstance(item, str):
        url, *more = item.split(",")
        table = {"url": url, **{key: value for key, _, value in (one.partition("=") for one in more)}}
    else:
        table = item
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
    try:
        return msgspec.structs.replace(replica, url=server_url(replica.url))
    except ConfigError as error:
        raise ConfigError(f"{where}: replicas: {error}") from error


def _groups(where: str, value: Any) -> tuple[GroupConfig, ...]:
    names = dict.fromkeys(field.name for field in msgspec.structs.fields(GroupConfig))
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, (Mapping, GroupConfig)) for item in value):
        raise ConfigError(f"{where}: groups: give tables, each headed by [[groups]] in a file")
    for key in (key for item in value if isinstance(item, Mapping) for key in item):
        if key not in names:
            raise ConfigError(f"{where}: groups: unknown key {key!r}; {_hint(key, names)}")
    try:
        groups = msgspec.convert(value, tuple[GroupConfig, ...])
        if twice := next((group.name for group in groups if sum(g.name == group.name for g in groups) > 1), None):
            raise ConfigError(f"{twice!r} is given twice; name each group once")
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{where}: groups: {error}") from error
    return groups


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return tree


def _check_whole(config: GatewayConfig) -> None:
    """Check what depends on several settings. Raises: ConfigError."""
    if not config.replicas and not config.groups:
        raise ConfigError("no replica given: name at least one, such as --replica http://127.0.0.1:8101")
    urls = [replica.url for replica in config.replicas]
    if twice := next((url for url in urls if urls.count(url) > 1), None):
        raise ConfigError(f"replica {twice} is given twice; name each replica once")
    if config.health.retry_min_s > config.health.retry_max_s:
        raise ConfigError("health.retry_min_s is larger than health.retry_max_s; make it the smaller one")
    for origin in config.browsers.origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(f"browsers.origins: {origin!r} is no origin; write https://HOST[:PORT], in small letters")
    make_policy(config.policy)
