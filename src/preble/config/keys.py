"""Named API keys in a TOML file: one table a key, each with the key's hash and what it may do."""

from __future__ import annotations

import re
import tomllib
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from preble.config.clients import TargetsConfig
from preble.errors import ConfigError

_NAMED = re.compile(r"([\w.-]+)=sha256:([0-9a-f]{64})")
"""A key in the configuration that has a name, and is its hash."""
Weight = Annotated[float, Meta(gt=0, le=1e6)]


class KeyConfig(TargetsConfig, frozen=True, forbid_unknown_fields=True):
    """One key. `sha256`: of the key, in hexadecimal; the key itself is written nowhere.

    `tenant`: whose key it is, by default the table's name; keys of one tenant share caches and their turn. `admin`: it
    may also use `/debug`, and sees where requests were placed. `share_cache`: what this tenant sends
    may be cached together with what other such tenants send; they can then infer from times what others have sent.
    `weight`: of its turn under overload. `priority`: the class of its requests (`queue.classes`); they may name a later
    one, but none before it. `requests_per_minute`, `tokens_per_minute` (of prompts and answers),
    `prompts_at_once`: its limits, none by default. The others: as `TargetsConfig` says.
    """

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    tenant: str | None = None
    admin: bool = False
    share_cache: bool = False
    weight: Weight = 1.0
    priority: str | None = None
    requests_per_minute: Annotated[int, Meta(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Meta(ge=1)] | None = None
    prompts_at_once: Annotated[int, Meta(ge=1)] | None = None


def named_key(given: str) -> tuple[str, str]:
    """Return the name and the hash of a key in the configuration (`auth.api_keys`, `auth.admin_keys`)."""
    if (named := _NAMED.fullmatch(given)) is not None:
        return named[1], named[2]
    digest = sha256(given.encode()).hexdigest()
    return f"key-{digest[:8]}", digest


def load_keys(path: str | Path, classes: tuple[str, ...] = ()) -> dict[str, KeyConfig]:
    """Return the keys in a file by name. `classes`: those that a key's `priority` may name.

    Raises: ConfigError: the file cannot be read, or a table is wrong; names the place and what to do.
    """
    try:
        tables = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"keys file {str(path)!r} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"keys file {str(path)!r} is not TOML: {error}") from error
    except RecursionError:
        raise ConfigError(f"keys file {str(path)!r} is not TOML: it is nested too deep") from None
    if not tables:  # whoever writes it anew may have emptied it first: that must not lock everybody out
        text = "holds no key; to refuse everybody, leave one table whose sha256 is 64 zeros"
        raise ConfigError(f"keys file {str(path)!r} {text}")
    keys = {name: _key(path, name, table) for name, table in tables.items()}
    for name, key in keys.items():
        if key.priority is not None and key.priority not in classes:
            text = f"priority {key.priority!r} is none of {', '.join(classes)} (queue.classes)"
            raise ConfigError(f"keys file {str(path)!r}: [{name}]: {text}")
    hashes = [key.sha256 for key in keys.values()]
    if twice := next((name for name, key in keys.items() if hashes.count(key.sha256) > 1), None):
        raise ConfigError(f"keys file {str(path)!r}: [{twice}] has the same key as another table; give each its own")
    return keys


def _key(path: str | Path, name: str, table: Any) -> KeyConfig:
    try:
        return msgspec.convert(table, KeyConfig)
    except msgspec.ValidationError as error:
        hint = "make a hash with: printf %s KEY | sha256sum"
        raise ConfigError(f"keys file {str(path)!r}: [{name}]: {error}; {hint}") from error
