"""The settings of a plug-in: the order, and whether to accept an untested engine version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from preble.core.replica.waiting_queue import QueueOrder
from preble.errors import ConfigError

ORDER_VARIABLE = "PREBLE_QUEUE_ORDER"
GROUPS_VARIABLE = "PREBLE_QUEUE_GROUPS"
ANY_VERSION_VARIABLE = "PREBLE_ANY_ENGINE_VERSION"

DEFAULT_GROUPS = 10
"""The number of priority groups (Algorithm 3 of the paper)."""


@dataclass(frozen=True, slots=True)
class OrderSettings:
    """How an engine orders its waiting requests."""

    order: QueueOrder = QueueOrder.GROUPS
    num_groups: int = DEFAULT_GROUPS

    @classmethod
    def read(cls, environ: Mapping[str, str], options: Mapping[str, object] | None = None) -> OrderSettings:
        """Return the settings of the environment variables; `options` ("order", "groups") override them.

        Raises: ConfigError: an unknown order or option, or a bad number of groups.
        """
        given = {key: environ[variable] for key, variable in _VARIABLES if environ.get(variable)} | dict(options or {})
        if unknown := given.keys() - dict(_VARIABLES).keys():
            raise ConfigError(f"unknown option {min(unknown)!r} for Preble's order; use order or groups")
        return cls(_order(given.get("order", "groups")), _num_groups(given.get("groups", DEFAULT_GROUPS)))


_VARIABLES = (("order", ORDER_VARIABLE), ("groups", GROUPS_VARIABLE))


def _order(name: object) -> QueueOrder:
    try:
        return QueueOrder(str(name))
    except ValueError:
        known = ", ".join(QueueOrder)
        raise ConfigError(f"unknown order {name!r} of waiting requests ({ORDER_VARIABLE}); use {known}") from None


def _num_groups(number: object) -> int:
    text = str(number)
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1000):
        raise ConfigError(f"{number!r} is not a number of priority groups ({GROUPS_VARIABLE}); give 1 to 1000")
    return int(text)


def require_version(engine: str, version: str, known: str, environ: Mapping[str, str]) -> None:
    """Check the engine's version. `known`: the tested one, such as "0.32" for all of 0.32.x.

    Raises: ConfigError: another version runs, and ANY_VERSION_VARIABLE is not set.
    """
    if re.match(rf"{re.escape(known)}(?![0-9])", version) or environ.get(ANY_VERSION_VARIABLE) == "1":
        return
    raise ConfigError(
        f"this version of Preble knows the inside of {engine} {known}, and this is {engine} {version}: install "
        f"{engine} {known} or a Preble that knows yours, or set {ANY_VERSION_VARIABLE}=1 to try it anyway"
    )
