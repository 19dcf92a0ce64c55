"""A knob: something that can be set, described once, by the text below its field in a section.

The text says what the knob is and why its default is what it is; the reference page is made from it:

    depth_s: Positive = 2.0
    '''[UNIT, expert] MEANING Why: WHY.'''

The brackets hold the unit, if there is one, and whether hardly anybody changes the knob.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec
from msgspec import Meta, Struct

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
OneOrMore = Annotated[int, Meta(ge=1)]
ZeroOrMore = Annotated[int, Meta(ge=0)]
_ABOUT = re.compile(r"(?:\[(?P<unit>[^],]*?)(?:, )?(?P<expert>expert)?\] )?(?P<text>.*) Why: (?P<why>.*)\.")


class Knob(Struct, frozen=True):
    """One thing that can be set. `key`: dotted, as in flags. `section`: whose field it is."""

    key: str
    type: Any
    default: Any
    section: type[Struct]

    @property
    def about(self) -> About:
        """What its section says of it. Reads the section's source."""
        return _abouts(self.section)[self.key.rpartition(".")[2]]


class About(NamedTuple):
    """What the text below a field says. `unit`: "" for none. `why`: it has the default that it has."""

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
        else:
            yield Knob(prefix + field.name, hint, field.default, struct)


@cache
def _abouts(section: type[Struct]) -> Mapping[str, About]:
    """Return what a section says of each of its fields."""
    [definition] = ast.parse(inspect.getsource(section)).body
    found = {}
    for field, below in pairwise(definition.body):  # type: ignore[attr-defined]
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            text = " ".join(ast.literal_eval(below.value).split())
            if (match := _ABOUT.fullmatch(text)) is None:
                raise ValueError(f"{section.__name__}.{ast.unparse(field.target)}: {text!r} does not say why")
            unit, expert, meaning, why = match.groups()
            found[ast.unparse(field.target)] = About(unit or "", meaning, why, expert is not None)
    return found
