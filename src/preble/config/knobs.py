"""A knob: something that can be set, described once by the `Annotated` type of its field in a section.

A description has constraints, unit, meaning, and why the default is what it is; the reference page is made from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct


def about(text: str, *, why: str, unit: str = "", is_expert: bool = False, **limits: Any) -> Meta:
    """Return the description of a field. `why`: it has the default that it has. `is_expert`: hardly anybody changes it.
    `limits`: `ge`, `gt`, `le`, as of msgspec.
    """
    return Meta(description=text, extra={"why": why, "unit": unit, "is_expert": is_expert}, **limits)


class Knob(Struct, frozen=True):
    """One thing that can be set. `key`: dotted, as in flags. `unit`: "" for none."""

    key: str
    type: Any
    default: Any
    unit: str
    text: str
    why: str
    is_expert: bool


def knobs(struct: type[Struct], prefix: str = "") -> Iterator[Knob]:
    """Yield every knob of `struct`, sections walked through, in the order of declaration."""
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, Struct):
            yield from knobs(hint, f"{prefix}{field.name}.")
            continue
        meta = next(m for m in get_args(hint) if isinstance(m, Meta))
        extra = meta.extra or {}
        told = (extra["unit"], meta.description or "", extra["why"], extra["is_expert"])
        yield Knob(prefix + field.name, hint, field.default, *told)
