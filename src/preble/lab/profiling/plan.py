"""What to measure of a replica, given its size. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from preble.errors import ConfigError

SHORTEST_LIMIT = 128
"""The fewest tokens of context with which a fit makes sense."""

LENGTHS = (1, 16, 64, *(part << doubled for doubled in range(6, 17) for part in (2, 3)))
"""128, 192, 256, 384 and so on, up to 196,608."""
QUICK_LENGTHS = (1, 64, 256, 1024, 4096, 16384)
BEHIND = (16, 128, 512, 2048)
"""New tokens behind a cached prefix."""

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (16, 512, 2048)
QUICK_BATCHES = (1, 4, 16)
KV_SHARE = 0.8
"""The most of the KV cache that sequences which decode together may fill, so that none is preempted."""


ADMITTING = (1, 4)
"""Sequences that decode while requests are admitted."""

ADMITTED_TOKENS = 16
"""Tokens of each such request: few, so that an error in their prefill time matters little."""

BURST = 8
"""Requests in a burst, one right after another; before and after it the batch decodes undisturbed."""

BURSTS = 5
ITERATIONS_A_REQUEST = 6
"""Time reserved for one request: its way, its turn, its answer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`lengths`: prompts from nothing, in tokens. `behind`: (cached, new) tokens. `decode`: (sequences, prompt tokens
    of each). `decode_tokens`: iterations to time. `repetitions`: of every prefill. `admitting`: (sequences, output
    tokens of each) that decode while bursts of other requests arrive. `loading`: tokens of prompts to load from a tier.
    """

    lengths: tuple[int, ...]
    behind: tuple[tuple[int, int], ...]
    decode: tuple[tuple[int, int], ...]
    decode_tokens: int
    repetitions: int
    admitting: tuple[tuple[int, int], ...]
    loading: tuple[int, ...] = ()

    @property
    def num_steps(self) -> int:
        """Return the number of prefill requests and decode rounds, for progress."""
        prefills = self.repetitions * (len(self.lengths) + len(self.behind))
        return prefills + len(self.decode) + len(self.admitting) + self.repetitions * len(self.loading)


def make_plan(max_tokens: int, kv_capacity_tokens: int, *, quick: bool = False, loads: bool = False) -> Plan:
    """Return what to measure of a replica whose longest sequence, prompt and output, is `max_tokens`.

    `loads`: whether also how long it loads KV from a tier.

    Raises: ConfigError: the replica is too small for a profile.
    """
    decode_tokens = 32 if quick else 64
    limit = min(max_tokens, kv_capacity_tokens) - 1
    if limit < SHORTEST_LIMIT:
        raise ConfigError(
            f"the replica takes sequences of {limit + 1} tokens at most; measuring needs more than {SHORTEST_LIMIT}: "
            "start it with a longer context (--max-model-len) and a larger KV cache"
        )
    known = QUICK_LENGTHS if quick else LENGTHS
    lengths = (*(n for n in known if n < limit), limit)
    return Plan(
        lengths=lengths,
        behind=_behind(limit, quick),
        decode=_decode(limit, kv_capacity_tokens, decode_tokens, quick),
        decode_tokens=decode_tokens,
        repetitions=3 if quick else 5,
        admitting=_admitting(limit, kv_capacity_tokens, quick),
        loading=(limit // 2, limit) if loads else (),
    )


def _behind(limit: int, quick: bool) -> tuple[tuple[int, int], ...]:
    shares = (2,) if quick else (8, 3, 1.25)
    contexts = sorted({int(limit / share) for share in shares})
    new = BEHIND[1:3] if quick else BEHIND
    return tuple((context, n) for context in contexts for n in new if context >= 32 and context + n <= limit)


def _decode(limit: int, kv_capacity_tokens: int, tokens: int, quick: bool) -> tuple[tuple[int, int], ...]:
    batches = QUICK_BATCHES if quick else BATCHES
    contexts = CONTEXTS[:2] if quick else CONTEXTS
    room = min(limit, kv_capacity_tokens)
    return tuple(
        (batch, context)
        for batch in batches
        for context in contexts
        if context + output_tokens(batch, context, tokens) <= room
        and batch * (context + output_tokens(batch, context, tokens)) <= KV_SHARE * kv_capacity_tokens
    )


def _admitting(limit: int, kv_capacity_tokens: int, quick: bool) -> tuple[tuple[int, int], ...]:
    """Return as many bursts as the tokens allow, each with an equally long pause; none if one does not fit."""
    a_burst = 2 * BURST * ITERATIONS_A_REQUEST
    room = min(limit, kv_capacity_tokens)
    found = []
    for batch in ADMITTING[:1] if quick else ADMITTING:
        most = int(min(room - ADMITTED_TOKENS, KV_SHARE * kv_capacity_tokens / batch - ADMITTED_TOKENS))
        bursts = min((most - a_burst // 2) // a_burst, 2 if quick else BURSTS)
        if bursts >= 1:
            found.append((batch, bursts * a_burst + a_burst // 2))
    return tuple(found)


def output_tokens(batch: int, context: int, tokens: int) -> int:
    """Return the tokens that each of `batch` sequences must generate for all to decode together `tokens` times.

    The first sequences begin while the last prompts are computed, at least 256 tokens of them per iteration.
    """
    return tokens + batch + batch * context // 256
