"""Time copies of prefixes from one replica to another, and fit the link between them.

A copy is timed as a gateway has it made, from its sending to the first token: by a p2p tier with one request to the
target; where one replica computes prompts for the other (NIXL, or roles), by a request to both, of which the source has
all cached. So the latency holds all that a copy costs beside its bytes. Neither replica may have other work.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from random import Random
from statistics import median

import msgspec
import numpy as np

from preble import __version__
from preble.core.costs.profile import CostProfile
from preble.core.types import Role
from preble.engines import Engine, EngineServer, Found, HttpClient
from preble.errors import ConfigError, EngineProtocolError, EngineTimeout
from preble.lab.profiling.least_deviation import non_negative_fit
from preble.lab.profiling.measure import TOKEN_IDS
from preble.lab.profiling.timing import Timer
from preble.profiles import with_kv_size

PARTS = (16, 8, 4, 2, 1)
"""Lengths to copy, as parts of the longest."""
MOST_PROBES = 6
MOST_MISSES = 3
"""We stop measuring after so many incomplete copies in a row: vLLM may wait 30 s for each."""
_ROLES = ((Role.MIXED, Role.MIXED), (Role.PREFILL, Role.DECODE))
"""Of replicas that send each other KV, and of those that get it."""
BYTES_COPIED = re.compile(
    rb'^vllm:(?:kv_offload_tiering_read_bytes_total\{.*tier="[^"]*p2p".*|nixl_bytes_transferred_sum\{.*)\} (\S+)',
    re.MULTILINE,
)


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
    _copied_bytes: list[tuple[int, float]] = field(default_factory=list, init=False)
    """Of each copy its tokens and its bytes: engines send whole blocks, some of them the last, partial one, too."""

    async def run(self, on_step: Callable[[int, int], None] = lambda done, total: None) -> LinkMeasurements:
        """Measure; `on_step` is given the copies made and their number.

        Raises: EngineError. ConfigError: the replicas cannot copy from each other.
        """
        source, target = [await _found(server) for server in (self.source, self.target)]
        asked, peer, model = self._checked(source, target)
        lengths = self._lengths(source, target)
        one, other, random = Timer(source.engine, model), Timer(asked, model), Random(self.seed)
        repetitions = 3 if self.quick else 5
        times: dict[int, list[tuple[float, float]]] = {tokens: [] for tokens in lengths}
        await self._copied(one, other, random, lengths[0], peer)  # the first copy also connects the two
        self._num_misses = 0
        self._copied_bytes.clear()
        for number in range(repetitions * len(lengths)):
            tokens = lengths[number % len(lengths)]
            found = await self._copied(one, other, random, tokens, peer)
            if found is not None:
                times[tokens].append(found)
            on_step(number + 1, repetitions * len(lengths))
        return LinkMeasurements(
            date=datetime.now(UTC).date().isoformat(),
            model=model,
            seed=self.seed,
            kv_bytes_per_token=_bytes_per_token(self._copied_bytes),
            copies=tuple(
                CopyTimes(tokens, *map(tuple, zip(*pairs, strict=True))) for tokens, pairs in times.items() if pairs
            ),
        )

    def _checked(self, source: Found, target: Found) -> tuple[Engine, str | None, str]:
        """Return whom to ask for a copy, where it is said to find the KV, if anywhere, and the model.

        Raises: ConfigError. EngineRefused: the source sends nobody KV.
        """
        if (roles := (source.info.spec.role, target.info.spec.role)) not in _ROLES:
            raise ConfigError(f"KV goes from one that prefills to one that decodes; these are {' and '.join(roles)}")
        pair = target.engine.paired(source.engine)
        peer = None if pair is not None else source.engine.kv_peer
        if pair is None and (peer is None or target.engine.kv_peer is None):
            lacking = self.source if peer is None else self.target
            raise ConfigError(
                f"{lacking.url} has no p2p tier and no NIXL, or does not say so: start vLLM with one of them "
                "(docs/howto/copies.md), and give --kv-peer for both if a p2p tier is not in development mode"
            )
        if source.info.spec.transfer_group != target.info.spec.transfer_group:
            both = f"{source.info.spec.transfer_group!r} and {target.info.spec.transfer_group!r}"
            raise ConfigError(f"replicas copy only from their like, and these are {both}")
        model = self.model or source.info.models[0]
        if model not in source.info.models or model not in target.info.models:
            raise ConfigError(f"both must serve {model!r}")
        return pair or target.engine, peer, model

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
        self, source: Timer, target: Timer, random: Random, tokens: int, peer: str | None
    ) -> tuple[float, float] | None:
        """Return seconds to compute a new prompt and to copy it; None if less than all was copied.

        Raises: EngineError, among others: too many copies in a row have failed.
        """
        prompt = random.choices(TOKEN_IDS, k=tokens + 1)
        computed = await source.ask(prompt, 1)
        await source.ask(prompt, 1)  # the first time it may not be in the memory yet that copies are served from
        bytes_before = await _copied_bytes(self.target.http)
        copied = await target.ask(prompt, 1, peer)
        self._copied_bytes.append((tokens, await _copied_bytes(self.target.http) - bytes_before))
        self._num_misses = 0 if copied.cached_tokens == tokens else self._num_misses + 1
        if self._num_misses >= MOST_MISSES:
            raise EngineProtocolError(
                f"replica {self.target.url} had {copied.cached_tokens} of {tokens} tokens after a copy from "
                f"{self.source.url}, and so {MOST_MISSES} times: does it report cached tokens "
                "(--enable-prompt-tokens-details), and does a connection lead from each to the other? Restart both "
                "before another attempt"
            )
        return None if self._num_misses else (computed.ttft_s, copied.ttft_s)


async def _found(server: EngineServer) -> Found:
    """Return what runs there: vLLM needs longer than one probe waits until it first says how it is configured."""
    for _ in range(MOST_PROBES - 1):
        with suppress(EngineTimeout):
            return await server.probe()
    return await server.probe()


async def _copied_bytes(http: HttpClient) -> float:
    """Return bytes of KV that a replica says it has copied from others."""
    return sum(float(value) for value in BYTES_COPIED.findall((await http.ask("/metrics")).content))


def _bytes_per_token(copied: list[tuple[int, float]]) -> int | None:
    """Return by how many bytes a copy grows with each token; None where nobody counts them.

    >>> _bytes_per_token([(320, 336e3), (640, 656e3), (640, 656e3)]), _bytes_per_token([(320, 0.0)])
    (1000, None)
    """
    counted = [(tokens, num_bytes) for tokens, num_bytes in copied if num_bytes]
    if len({tokens for tokens, _ in counted}) < 2:
        return None
    features = np.array([[1, tokens] for tokens, _ in counted], float)
    num_bytes = np.array([num_bytes for _, num_bytes in counted])
    return round(non_negative_fit(features, num_bytes, num_bytes)[0][1]) or None


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
