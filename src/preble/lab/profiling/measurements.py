"""Raw measurements of one replica. Kept as JSON, so that the fit can be repeated."""

from __future__ import annotations

from statistics import median, quantiles

import msgspec

from preble import __version__
from preble.core.types import Tier

NOISY_SPREAD = 0.15
"""Repetitions that spread more than this were disturbed."""


class PrefillTimes(msgspec.Struct, frozen=True):
    """Times from sending a prompt to its first token, in seconds. `cached_tokens`: its first tokens, from the cache."""

    new_tokens: int
    cached_tokens: int
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return median(self.seconds)


class DecodeTimes(msgspec.Struct, frozen=True):
    """Times of one decode iteration of `num_sequences`, in seconds. `context_tokens`: of all sequences together."""

    num_sequences: int
    context_tokens: int
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return median(self.seconds)


class AdmissionTimes(msgspec.Struct, frozen=True):
    """Seconds by which each admitted request delays the tokens of a batch that decodes.

    `num_sequences`, `context_tokens`: of the batch, as in `DecodeTimes`. `new_tokens`: of each admitted request, all
    uncached. `seconds`: the mean over each burst; a disturbed one may be negative.
    """

    num_sequences: int
    context_tokens: int
    new_tokens: int
    seconds: tuple[float, ...]


class LoadTimes(msgspec.Struct, frozen=True):
    """Seconds to the first token of prompts that a tier held, `loaded_s`, and of the same ones a moment later, when the
    engine's memory held them, `resident_s`. `tokens`: cached ones of each prompt."""

    tokens: int
    loaded_s: tuple[float, ...]
    resident_s: tuple[float, ...]

    @property
    def per_token_s(self) -> float:
        return (median(self.loaded_s) - median(self.resident_s)) / self.tokens


class Measurements(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All times of one replica.

    `over_http`: times include a request's way to the replica and back. `kv_capacity_tokens`: as the engine reports, or
    as given. `tier`: from where `loads` were loaded. `seed`: of the random prompts. `notes`: what could not be measured
    and why.
    """

    version: str = __version__
    date: str
    machine: str
    engine: str
    model: str
    seed: int
    over_http: bool = True
    kv_capacity_tokens: int
    prefill: tuple[PrefillTimes, ...]
    decode: tuple[DecodeTimes, ...]
    admissions: tuple[AdmissionTimes, ...] = ()
    tier: Tier | None = None
    loads: tuple[LoadTimes, ...] = ()
    notes: tuple[str, ...] = ()

    def source(self, command: str) -> str:
        """Say where a profile fitted to these comes from, `command` being what measured."""
        notes = "".join(f" {note[0].upper()}{note[1:]}." for note in self.notes)
        return (
            f"Measured by {command} {self.version} on {self.date}: {self.model} under {self.engine} on {self.machine}, "
            f"{len(self.prefill)} prefills and {len(self.decode)} decodes.{notes}"
        )


def spread(seconds: tuple[float, ...]) -> float:
    """Return the width of the repetitions' middle half relative to their median; 0.0 for fewer than two.

    >>> spread((1.0, 1.0, 1.0))
    0.0
    >>> round(spread((0.9, 1.0, 1.0, 1.1, 9.0)), 2)
    0.1
    """
    if len(seconds) < 2:
        return 0.0
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle if middle > 0 else 0.0
