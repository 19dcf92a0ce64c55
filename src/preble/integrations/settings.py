"""What a plug-in is told: the order, and that a version is to be taken though nobody has tried it."""

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
"""Of Algorithm 3 in the paper."""


@dataclass(frozen=True, slots=True)
class OrderSettings:
    """How an engine orders its waiting requests."""

    order: QueueOrder = QueueOrder.GROUPS
    num_groups: int = DEFAULT_GROUPS

    @classmethod
    def read(cls, environ: Mapping[str, str], options: Mapping[str, object] | None = None) -> OrderSettings:
        """From environment variables, and from `options` ("order", "groups"), which go before them.

        Raises: ConfigError: an unknown order or option, or a number of groups that is none.
        """
        given = {key: environ[variable] for key, variable in _VARIABLES if environ.get(variable)} | dict(options or {})
        if unknown := given.keys() - dict(_VARIABLES).keys():
            raise ConfigError(f"unknown option {min(unknown)!r} for Preble's order; known: order, groups")
        return cls(_order(given.get("order", "groups")), _num_groups(given.get("groups", DEFAULT_GROUPS)))


_VARIABLES = (("order", ORDER_VARIABLE), ("groups", GROUPS_VARIABLE))


def _order(name: object) -> QueueOrder:
    try:
        return QueueOrder(str(name))
    except ValueError:
        known = ", ".join(QueueOrder)
        raise ConfigError(f"unknown order {name!r} of waiting requests ({ORDER_VARIABLE}); known: {known}") from None


def _num_groups(number: object) -> int:
    text = str(number)
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1000):
        raise ConfigError(f"{number!r} is no number of priority groups ({GROUPS_VARIABLE}); give 1 to 1000, such as 10")
    return int(text)


def require_version(engine: str, version: str, known: str, environ: Mapping[str, str]) -> None:
    """`known`: the version, such as "0.32" for all of 0.32.x, whose insides the plug-in was written for and tested on.

    Raises: ConfigError: another one runs, and nobody said that it shall do.
    """
    if re.match(rf"{re.escape(known)}(?![0-9])", version) or environ.get(ANY_VERSION_VARIABLE) == "1":
        return
    raise ConfigError(
        f"this version of Preble knows the scheduler of {engine} {known}, and this is {engine} {version}: install "
        f"{engine} {known} or a Preble that knows yours, or set {ANY_VERSION_VARIABLE}=1 to try it all the same"
    )
