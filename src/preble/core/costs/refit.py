"""The cost profile corrected while serving: a factor each for prefill, decode and links, from live requests.

The shape of a profile is measured offline. In service its times are wrong mostly by a factor (another GPU, another
clock, a server's overhead). Each factor follows the median of measured / predicted over the last requests: if one time
in five is wrong, a median moves little. Steps and range are bounded. Equal samples at equal times give equal models.
Which requests are samples: `core.placing.timing_samples`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from math import inf
from statistics import median

from preble.core.costs.model import CostModel, CostProfile


@dataclass(frozen=True, slots=True)
class RefitSettings:
    """How the cost profile is corrected.

    `interval_s`: the shortest time between two corrections. `num_samples`: the number of latest samples of each kind
    that count. `min_samples`: with fewer nothing is corrected. `max_step`: the largest factor by which a factor changes
    at once. `max_factor`: the largest distance from the profile, as a factor. `dead_band`: smaller relative changes are
    ignored. `link_memory_s`: without a copy for so long, what was learned of links is forgotten.
    """

    interval_s: float = 10.0
    num_samples: int = 128
    min_samples: int = 16
    max_step: float = 1.25
    max_factor: float = 4.0
    dead_band: float = 0.03
    link_memory_s: float = 300.0


class PrefillSample:
    """A prompt that waited for no other. `seconds`: from its placement to its first token. `num_decoding`: others in
    decode, with `decode_context_tokens` of context together."""

    __slots__ = ("cached_tokens", "decode_context_tokens", "new_tokens", "num_decoding", "seconds")

    def __init__(
        self, new_tokens: int, cached_tokens: int, num_decoding: int, decode_context_tokens: int, seconds: float
    ) -> None:
        self.new_tokens = new_tokens
        self.cached_tokens = cached_tokens
        self.num_decoding = num_decoding
        self.decode_context_tokens = decode_context_tokens
        self.seconds = seconds

    def predicted_s(self, model: CostModel) -> float:
        """Return the predicted TTFT. On average a prompt arrives in the middle of a decode iteration, and then shares
        the one that admits it.
        """
        running_s = model.decode_iteration_s(self.num_decoding, self.decode_context_tokens)
        chunk = (self.new_tokens, self.cached_tokens)
        shared_s = model.iteration_s((chunk,), self.num_decoding, self.decode_context_tokens)
        return running_s / 2 + shared_s + model.admission_s(1)


class DecodeSample:
    """An answer of `num_iterations` after its first token, in a batch of `num_sequences` (at least 1) on average, with
    `context_tokens` together. `seconds`: without the prefills of others meanwhile."""

    __slots__ = ("context_tokens", "num_iterations", "num_sequences", "seconds")

    def __init__(self, num_iterations: int, num_sequences: int, context_tokens: int, seconds: float) -> None:
        self.num_iterations = num_iterations
        self.num_sequences = num_sequences
        self.context_tokens = context_tokens
        self.seconds = seconds

    def predicted_s(self, model: CostModel) -> float:
        return self.num_iterations * model.decode_iteration_s(self.num_sequences, self.context_tokens)


class CopySample:
    """A copy of `tokens` of KV for which both links were idle. `seconds`: from its placement until it was there."""

    __slots__ = ("seconds", "tokens")

    def __init__(self, tokens: int, seconds: float) -> None:
        self.tokens = tokens
        self.seconds = seconds

    def predicted_s(self, model: CostModel) -> float:
        return model.link_s(self.tokens) + model.link_latency_s


@dataclass(frozen=True, slots=True)
class CostFactors:
    """What a profile's times are multiplied by; `link`: those of transfers between replicas."""

    prefill: float = 1.0
    decode: float = 1.0
    link: float = 1.0


def scaled(profile: CostProfile, factors: CostFactors) -> CostProfile:
    """Return the profile with its times multiplied, except a request's overhead, which the GPU does not cause.

    A prefill's time up to the fixed part of a decode iteration is that fixed part (reading the weights), so the decode
    factor applies to it, and the prefill factor to the rest. Otherwise a slower prefill would slow down decoding too.
    """
    base_s = profile.decode_base_s

    def corrected(seconds: float) -> float:
        return factors.decode * min(seconds, base_s) + factors.prefill * max(seconds - base_s, 0.0)

    return replace(
        profile,
        prefill_points=tuple((tokens, corrected(seconds)) for tokens, seconds in profile.prefill_points),
        attention_s_per_pair=factors.prefill * profile.attention_s_per_pair,
        attention_s_per_context_token=factors.prefill * profile.attention_s_per_context_token,
        decode_base_s=factors.decode * base_s,
        decode_s_per_sequence=factors.decode * profile.decode_s_per_sequence,
        decode_s_per_context_token=factors.decode * profile.decode_s_per_context_token,
        link_bytes_per_s=None if profile.link_bytes_per_s is None else profile.link_bytes_per_s / factors.link,
        link_latency_s=factors.link * profile.link_latency_s,
    )


class CostRefit:
    """Keeps the last samples and the factors that fit them. `model`: the profile corrected by the factors.

    The constructor's `factors`: known from before, 1 otherwise.
    """

    def __init__(
        self, profile: CostProfile, settings: RefitSettings | None = None, factors: CostFactors | None = None
    ) -> None:
        self.settings = settings or RefitSettings()
        self.factors = CostFactors()
        if factors is not None:
            self.factors = CostFactors(self._bounded(factors.prefill), self._bounded(factors.decode))
        self._as_profiled = CostModel(profile)
        self.model = CostModel(scaled(profile, self.factors)) if factors is not None else self._as_profiled
        self._profile = profile
        self._prefills: deque[PrefillSample] = deque(maxlen=self.settings.num_samples)
        self._decodes: deque[DecodeSample] = deque(maxlen=self.settings.num_samples)
        self._copies: deque[CopySample] = deque(maxlen=self.settings.num_samples)
        self._copied_at = -inf
        self._num_new = 0
        self._due_at: float | None = None
        self._last_at = -inf

    def note_prefill(self, sample: PrefillSample, now: float) -> None:
        """Note a prefill, unless it is so short that most of it is the fixed part of an iteration."""
        alone_s = self._as_profiled.prefill_s(sample.new_tokens, sample.cached_tokens)
        if alone_s >= 2 * self._profile.decode_base_s and sample.seconds > 0:
            self._prefills.append(sample)
            self._note_new(now)

    def note_decode(self, sample: DecodeSample, now: float) -> None:
        if sample.seconds > 0:
            self._decodes.append(sample)
            self._note_new(now)

    def note_copy(self, sample: CopySample, now: float) -> None:
        if sample.seconds > 0:
            self._copies.append(sample)
            self._copied_at = now
            self._note_new(now)

    def _note_new(self, now: float) -> None:
        self._num_new += 1
        if self._num_new >= self.settings.min_samples and self._due_at is None:
            self._due_at = max(self._last_at + self.settings.interval_s, now)

    @property
    def due_at(self) -> float | None:
        """When to correct next; None while there are too few new samples."""
        return self._due_at

    def refit(self, now: float) -> CostModel | None:
        """Return the corrected model if it is due and differs, else None. O(samples), a fraction of a millisecond."""
        if self._due_at is None or self._due_at > now:
            return None
        self._due_at, self._num_new, self._last_at = None, 0, now
        old = self.factors
        new = CostFactors(
            self._moved(old.prefill, self._prefills), self._moved(old.decode, self._decodes), self._moved_link(now)
        )
        if all(map(self._alike, (new.prefill, new.decode, new.link), (old.prefill, old.decode, old.link))):
            return None
        self.factors = new
        self.model = CostModel(scaled(self._profile, new))
        return self.model

    def _moved_link(self, now: float) -> float:
        """Return the links' factor: the profile's once nothing was copied for long, else nobody would try again."""
        if now - self._copied_at > self.settings.link_memory_s:
            self._copies.clear()
            return 1.0
        return self._moved(self.factors.link, self._copies)

    def _moved(self, factor: float, samples: deque[PrefillSample] | deque[DecodeSample] | deque[CopySample]) -> float:
        """Return the factor after one bounded step towards what the samples say."""
        if len(samples) < self.settings.min_samples:
            return factor
        predictions = [(sample.seconds, sample.predicted_s(self.model)) for sample in samples]
        ratios = [measured_s / predicted_s for measured_s, predicted_s in predictions if predicted_s > 0]
        if not ratios:
            return factor
        step = min(max(median(ratios), 1 / self.settings.max_step), self.settings.max_step)
        return self._bounded(factor * step)

    def _bounded(self, factor: float) -> float:
        return min(max(factor, 1 / self.settings.max_factor), self.settings.max_factor)

    def _alike(self, new: float, old: float) -> bool:
        return abs(new / old - 1.0) < self.settings.dead_band
