"""What placing needs to know of a client's request besides its token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from preble.config import TargetsConfig
from preble.core.types import NO_TARGET, Target
from preble.errors import RequestError
from preble.prompts.endpoints import FLEX
from preble.rules.callers import ANYBODY, Caller

PRIORITY = b"x-preble-priority"
MAX_WAIT = b"x-preble-max-wait"
TTFT_TARGETS = (b"x-preble-ttft-ms", b"x-llm-d-slo-ttft-ms", b"x-sgl-ttft-slo-ms")
"""In milliseconds; the first that a request has counts. The others are those of llm-d and SGLang."""
TPOT_TARGETS = (b"x-preble-tpot-ms", b"x-llm-d-slo-tpot-ms")
TOKENS_PER_S = b"x-sgl-tps-slo"
"""SGLang's way to say the time between two tokens."""
ASKING = frozenset((*TTFT_TARGETS, *TPOT_TARGETS, TOKENS_PER_S))
"""The headers that ask for a target."""
_LARGEST = 1e9
_SHOWN = 40
"""Letters of what a client named."""
TargetSeconds = Annotated[float, Meta(gt=0, le=_LARGEST)]
MonotonicSeconds = Annotated[float, Meta(ge=0, le=1e12)]
"""A time of the event loop's clock."""


class Terms(Struct, frozen=True, array_like=True):
    """Who sends a request, and on which terms it is placed. `request_id`: of the whole request, however many prompts.
    `num_answers`: to all of its prompts.

    `priority`, `max_wait`: the headers as the client sent them. `tier`: the body's `service_tier`.
    `arrived_at`: when the whole request had arrived, by the event loop's clock; None if unknown.
    `is_traced`: whether the carrier wants to know the candidates of its placements.
    `ttft_target_s`, `tpot_target_s`: what it asks for, see `core.types.Target`.
    """

    request_id: str
    num_answers: Annotated[int, Meta(ge=1)] = 1
    model: str | None = None
    streams: bool = True
    caller: Caller = ANYBODY
    priority: str | None = None
    max_wait: str | None = None
    tier: str | None = None
    arrived_at: MonotonicSeconds | None = None
    is_traced: bool = False
    ttft_target_s: TargetSeconds | None = None
    tpot_target_s: TargetSeconds | None = None

    @property
    def asked(self) -> str | None:
        """What its client has asked for besides an answer, in words; None for nothing."""
        if self.priority is None and self.tier is None and self.target is None:
            return None
        named = {"class": self.priority, "service tier": self.tier}
        asked = [f"{what} {name[:_SHOWN]!r}" for what, name in named.items() if name is not None]
        if self.ttft_target_s is not None:
            asked.append(f"the first token in {self.ttft_target_s:g} s")
        if self.tpot_target_s is not None:
            asked.append(f"{self.tpot_target_s:g} s a token")
        return ", ".join(asked)

    @property
    def target(self) -> Target | None:
        """What it asks for; None for nothing."""
        if self.ttft_target_s is None and self.tpot_target_s is None:
            return None
        return Target(self.ttft_target_s, self.tpot_target_s)


def rank_of(terms: Terms, classes: Sequence[str]) -> int:
    """Return the place of a request's class among `classes`: the one that the header names, else the body's
    `service_tier`, of which `flex` is the last class; never before the class of the key.

    Raises: RequestError: there is no class of the name in the header.
    """
    key = terms.caller.limits
    best = classes.index(key.priority) if key is not None and key.priority is not None else 0
    if (name := terms.priority) is None:
        named = classes.index(terms.tier) if terms.tier in classes else len(classes) - 1 if terms.tier == FLEX else 0
        return max(best, named)
    if name not in classes:
        raise RequestError(f"{PRIORITY.decode()}: {name[:50]!r} is none of {', '.join(classes)}")
    return max(best, classes.index(name))


def target_of(headers: Mapping[bytes, bytes], caller: Caller, of_model: TargetsConfig | None = None) -> Target:
    """Return what a request asks for: by its headers, else by its key, else by its model, and nothing shorter than the
    key and the model may be asked for.

    Raises: RequestError: a header is not a number of milliseconds, or of tokens a second.
    """
    ttft_ms, tpot_ms = _first(headers, TTFT_TARGETS), _first(headers, TPOT_TARGETS)
    if tpot_ms is None and (tokens_per_s := _number(headers, TOKENS_PER_S)) is not None:
        tpot_ms = 1000 / tokens_per_s
    rules = [rule for rule in (caller.limits, of_model) if rule is not None]
    ttft_ms = _within(ttft_ms, [(rule.ttft_ms, rule.least_ttft_ms) for rule in rules])
    tpot_ms = _within(tpot_ms, [(rule.tpot_ms, rule.least_tpot_ms) for rule in rules])
    if ttft_ms is None and tpot_ms is None:
        return NO_TARGET
    return Target(None if ttft_ms is None else ttft_ms / 1000, None if tpot_ms is None else tpot_ms / 1000)


def _within(asked_ms: float | None, rules: Sequence[tuple[float | None, float | None]]) -> float | None:
    """Return what is asked for, else the first default, and at least the longest limit. `rules`: defaults, limits."""
    if asked_ms is None:
        asked_ms = next((default for default, _ in rules if default is not None), None)
    return asked_ms if asked_ms is None else max(asked_ms, *(least or 0.0 for _, least in rules), 0.0)


def _first(headers: Mapping[bytes, bytes], names: Sequence[bytes]) -> float | None:
    return next((given for name in names if (given := _number(headers, name)) is not None), None)


def _number(headers: Mapping[bytes, bytes], name: bytes) -> float | None:
    """Raises: RequestError: it is not a number above 0."""
    if (given := headers.get(name)) is None:
        return None
    try:
        number = float(given)
    except ValueError:
        number = 0.0
    if not 0 < number <= _LARGEST:
        raise RequestError(f"{name.decode()}: {given[:50].decode('latin-1')!r} is not a number above 0")
    return number
