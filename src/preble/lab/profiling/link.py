"""Time copies of prefixes from one replica to another, and fit the link between them.

A copy is timed as a gateway has it made: one request to the target, from its sending to its first token. So the latency
holds all that a copy costs beside its bytes. Neither replica may have other work.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from random import Random
from statistics import median

import msgspec
import numpy as np

from preble import __version__
from preble.core.costs.profile import CostProfile
from preble.engines import Engine, EngineServer, Found
from preble.errors import ConfigError, EngineProtocolError
from preble.lab.profiling.least_deviation import non_negative_fit
from preble.lab.profiling.measure import TOKEN_IDS
from preble.lab.profiling.timing import Timer
from preble.profiles import with_kv_size

PARTS = (16, 8, 4, 2, 1)
"""Lengths to copy, as parts of the longest."""
MOST_MISSES = 3
"""We stop measuring after so many incomplete copies in a row: vLLM may wait 30 s for each."""
BYTES_COPIED = re.compile(rb'^vllm:kv_offload_tiering_read_bytes_total\{.*tier="[^"]*p2p".*\} (\S+)', re.MULTILINE)


class CopyTimes(msgspec.Struct, frozen=True):
    """Seconds to the first token of prompts that are one token longer than `tokens`: computed by the source, and copied
    by the target."""

    tokens: int
    computed_s: tuple[float, ...]
    copied_s: tuple[float, ...]


class LinkMeasurements(msgspec.Struct, frozen=True, kw_only=True):
    """All times of one link. `kv_bytes_per_token`: None where the target does not count the bytes that it copies."""

    version: str = __version__
    date: str
    model: str
    seed: int
    kv_bytes_per_token: int | None
    copies: tuple[CopyTimes, ...]


@dataclass(eq=False)
class LinkMeasuring:
    """One measurement of copies from `source` to `target`.

    `max_tokens`: longest prompt; None for half of what both take and cache. `model`: None takes the base model.
    """

    source: EngineServer
    target: EngineServer
    _: KW_ONLY
    seed: int
    quick: bool = False
    model: str | None = None
    max_tokens: int | None = None
    _num_misses: int = field(default=0, init=False)
    _copied_tokens: int = field(default=0, init=False)

    async def run(self, on_step: Callable[[int, int], None] = lambda done, total: None) -> LinkMeasurements:
        """Measure; `on_step` is given the copies made and their number.

        Raises: EngineError. ConfigError: the replicas cannot copy from each other.
        """
        source, target = await self.source.probe(), await self.target.probe()
        peer, model = self._checked(source, target)
        lengths = self._lengths(source, target)
        one, other, random = Timer(source.engine, model), Timer(target.engine, model), Random(self.seed)
        repetitions = 3 if self.quick else 5
        times: dict[int, list[tuple[float, float]]] = {tokens: [] for tokens in lengths}
        await self._copied(one, other, random, lengths[0], peer)  # the first copy also connects the two
        self._num_misses = self._copied_tokens = 0
        bytes_before = await _copied_bytes(target.engine)
        for number in range(repetitions * len(lengths)):
            tokens = lengths[number % len(lengths)]
            found = await self._copied(one, other, random, tokens, peer)
            if found is not None:
                times[tokens].append(found)
            on_step(number + 1, repetitions * len(lengths))
        num_bytes = await _copied_bytes(target.engine) - bytes_before
        return LinkMeasurements(
            date=datetime.now(UTC).date().isoformat(),
            model=model,
            seed=self.seed,
            kv_bytes_per_token=round(num_bytes / self._copied_tokens) or None if self._copied_tokens else None,
            copies=tuple(
                CopyTimes(tokens, *map(tuple, zip(*pairs, strict=True))) for tokens, pairs in times.items() if pairs
            ),
        )

    def _checked(self, source: Found, target: Found) -> tuple[str, str]:
        """Return where the source's tier is, and the model. Raises: ConfigError."""
        peer = source.engine.kv_peer
        if peer is None or target.engine.kv_peer is None:
            lacking = self.source if peer is None else self.target
            raise ConfigError(
                f"{lacking.url} has no p2p tier, or does not say where: start vLLM with one (docs/howto/copies.md), "
                "and give --kv-peer for both if it is not in development mode"
            )
        if source.info.spec.transfer_group != target.info.spec.transfer_group:
            both = f"{source.info.spec.transfer_group!r} and {target.info.spec.transfer_group!r}"
            raise ConfigError(f"replicas copy only from their like, and these are {both}")
        model = self.model or source.info.models[0]
        if model not in source.info.models or model not in target.info.models:
            raise ConfigError(f"both must serve {model!r}")
        return peer, model

    def _lengths(self, source: Found, target: Found) -> tuple[int, ...]:
        """Return tokens in whole blocks, ascending. Raises: ConfigError: fewer than two lengths."""
        block_size = source.info.spec.block_size
        limits = [self.max_tokens] if self.max_tokens else []
        for found in (source, target):
            limits += [limit // 2 for limit in (found.info.max_model_len, found.info.spec.kv_capacity_tokens) if limit]
        if not limits:
            raise ConfigError(f"{source.engine.url} does not report its longest sequence; give --max-tokens")
        lengths = sorted({min(limits) // part // block_size * block_size for part in PARTS} - {0})
        if len(lengths) < 2:
            raise ConfigError(f"prompts of up to {min(limits)} tokens have too few blocks of {block_size}")
        return tuple(lengths)

    async def _copied(
        self, source: Timer, target: Timer, random: Random, tokens: int, peer: str
    ) -> tuple[float, float] | None:
        """Return seconds to compute a new prompt and to copy it; None if less than all was copied.

        Raises: EngineError, among others: too many copies in a row have failed.
        """
        prompt = random.choices(TOKEN_IDS, k=tokens + 1)
        computed = await source.ask(prompt, 1)
        await source.ask(prompt, 1)  # the first time it may not be in the memory yet that copies are served from
        copied = await target.ask(prompt, 1, peer)
        self._copied_tokens += copied.cached_tokens or 0
        self._num_misses = 0 if copied.cached_tokens == tokens else self._num_misses + 1
        if self._num_misses >= MOST_MISSES:
            raise EngineProtocolError(
                f"replica {self.target.url} had {copied.cached_tokens} of {tokens} tokens after a copy from {peer}, "
                f"and so {MOST_MISSES} times: does it report cached tokens (--enable-prompt-tokens-details), and does "
                "a connection lead from each to the other? Restart both before another attempt"
            )
        return None if self._num_misses else (computed.ttft_s, copied.ttft_s)


async def _copied_bytes(engine: Engine) -> float:
    """Return bytes of KV that a replica says it has copied from others."""
    return sum(float(value) for value in BYTES_COPIED.findall((await engine.http.ask("/metrics")).content))


def with_link(profile: CostProfile, measured: LinkMeasurements) -> CostProfile:
    """Return the profile with the link that fits these measurements.

    Raises: ConfigError: the size of a token's KV is not known, or longer copies took no longer.
    """
    kv_bytes = measured.kv_bytes_per_token or with_kv_size(profile).kv_bytes_per_token
    if kv_bytes is None:
        raise ConfigError("the target does not count the bytes that it copies: put kv_bytes_per_token into the profile")
    features = np.array([[1, times.tokens] for times in measured.copies], float)
    seconds = np.array([median(times.copied_s) for times in measured.copies])
    latency_s, s_per_token = non_negative_fit(features, seconds, seconds)[0] if len(seconds) > 1 else (0.0, 0.0)
    if not s_per_token:
        raise ConfigError("longer copies took no longer, so the link has no rate: measure again when both are idle")
    return replace(
        profile,
        source=f"{profile.source} Its link: `preble profile --transfer` {measured.version} on {measured.date}.",
        kv_bytes_per_token=kv_bytes,
        link_bytes_per_s=float(f"{kv_bytes / s_per_token:.4g}"),
        link_latency_s=float(f"{latency_s:.4g}"),
    )
