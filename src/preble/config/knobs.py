"""A knob: something that can be set, described once, by the text below its field in a section.

The text says what the knob is and why its default is what it is; `dev/settings_page.py` makes its page from it:

    depth_s: Positive = 2.0
    '''[UNIT, expert] MEANING Why: WHY.'''

The brackets hold the unit, if there is one, and whether hardly anybody changes the knob.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta, Struct

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
OneOrMore = Annotated[int, Meta(ge=1)]
ZeroOrMore = Annotated[int, Meta(ge=0)]


class Knob(Struct, frozen=True):
    """One thing that can be set. `key`: dotted, as in flags. `section`: whose field it is."""

    key: str
    type: Any
    default: Any
    section: type[Struct]


def knobs(struct: type[Struct], prefix: str = "") -> Iterator[Knob]:
    """Yield every knob of `struct`, sections walked through, in the order of declaration."""
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, Struct):
            yield from knobs(hint, f"{prefix}{field.name}.")
        else:
            yield Knob(prefix + field.name, hint, field.default, struct)
