"""The engines' own prefix-cache counters, read from their /metrics: independent of the gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from preble.errors import ConfigError

QUERIES = "vllm:prefix_cache_queries_total"
HITS = "vllm:prefix_cache_hits_total"


class CacheCounters(msgspec.Struct, frozen=True):
    """Prompt tokens that an engine looked up in its prefix cache, and those that it found there."""

    queried_tokens: int = 0
    hit_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Found / looked up; 0.0 before anything was looked up.

        >>> CacheCounters(queried_tokens=200, hit_tokens=50).hit_rate
        0.25
        """
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def computed_tokens(self) -> int:
        return self.queried_tokens - self.hit_tokens

    def __add__(self, other: CacheCounters) -> CacheCounters:
        """
        >>> CacheCounters(4, 1) + CacheCounters(6, 4)
        CacheCounters(queried_tokens=10, hit_tokens=5)
        """
        return CacheCounters(self.queried_tokens + other.queried_tokens, self.hit_tokens + other.hit_tokens)

    def since(self, before: CacheCounters) -> CacheCounters:
        """
        >>> CacheCounters(10, 5).since(CacheCounters(4, 1))
        CacheCounters(queried_tokens=6, hit_tokens=4)
        """
        return CacheCounters(self.queried_tokens - before.queried_tokens, self.hit_tokens - before.hit_tokens)


def total(counters: Mapping[str, CacheCounters]) -> CacheCounters:
    """Return the sum over replicas."""
    return sum(counters.values(), CacheCounters())


async def read_counters(urls: Sequence[str]) -> dict[str, CacheCounters]:
    """Return the counters of each replica now.

    Raises: ConfigError: a replica does not answer, or has no such counters.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        return {url: parse_counters(url, await _metrics_of(session, url)) for url in urls}


def parse_counters(url: str, text: str) -> CacheCounters:
    """Return the counters in a Prometheus page, summed over label sets. Raises: ConfigError: they are missing."""
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in (QUERIES, HITS):
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
    except ValueError as error:
        raise ConfigError(f"{url}/metrics is not a Prometheus page: {error}") from error
    if len(found) < 2:
        raise ConfigError(f"{url}/metrics has no {QUERIES} and {HITS}; leave --replica out for such an engine")
    return CacheCounters(int(found[QUERIES]), int(found[HITS]))


async def _metrics_of(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/metrics") as response:
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConfigError(f"replica {url} does not answer: {error or type(error).__name__}") from error
    if response.status != 200:
        raise ConfigError(f"{url}/metrics answers with status {response.status}")
    return text
