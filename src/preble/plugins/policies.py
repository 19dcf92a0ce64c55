"""Policies by name: Preble's own, those of installed packages, and `module:Class` for a class of yours.

A package gives a policy a short name with an entry point of the group `preble.policies`; see docs/howto/own-policy.md.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from preble.core.policies import registry
from preble.core.policies.policy import Policy
from preble.errors import ConfigError
from preble.plugins.classes import installed, load_class

ENTRY_POINTS = "preble.policies"


def policy_names() -> tuple[str, ...]:
    """Return every policy that has a name: Preble's own, the default first, then those of installed packages."""
    return tuple(dict.fromkeys((*registry.policy_names(), *installed(ENTRY_POINTS))))


def make_policy(name: str) -> Policy:
    """Return a new policy. `name`: one of `policy_names()`, perhaps with settings (`e2?threshold=2`), or
    `module:Class`.

    Raises: ConfigError: there is no such policy, or it cannot be made; the message says why.
    """
    if name.partition("?")[0] in registry.policy_names():
        return registry.make_policy(name)
    policy_class = _own_class(name)
    try:
        policy: Policy = policy_class()
    except Exception as error:
        raise ConfigError(f"policy {name!r}: making one failed: {type(error).__name__}: {error}") from error
    if not callable(getattr(policy, "choose", None)):
        raise ConfigError(f"policy {name!r}: {policy_class.__name__} needs a method choose(self, view, rng)")
    if not isinstance(getattr(policy, "name", None), str):
        raise ConfigError(f"policy {name!r}: {policy_class.__name__} needs a name, such as name = 'mine'")
    return policy


def source_files(name: str) -> tuple[Path, ...]:
    """Return the file that a policy is read from if it is not one of Preble's own. Raises: ConfigError."""
    if name.partition("?")[0] in registry.policy_names():
        return ()
    file = inspect.getsourcefile(_own_class(name))
    return () if file is None else (Path(file),)


def _own_class(name: str) -> type[Any]:
    path = name if ":" in name else installed(ENTRY_POINTS).get(name)
    if path is None:
        raise ConfigError(f"unknown policy {name!r}; choose one of {', '.join(policy_names())}, or name module:Class")
    return load_class("policy", name, path)
