"""The highest steady rate that any scheduler could carry of streams whose caches hold only a part of the prefixes.

Theory. Requests of a stream come at random times (Poisson), independent of all before, and a scheduler does not know
them in advance. Four things then bound what it can do, all of them averages over a time without end:

1. *Misses.* Take a token of a prefix that is asked for at rate v. From when the last cache drops it, 1 / v passes on
   average until somebody asks for it, who waits for at most `patience_s` until it is computed again. So a token that is
   in some cache for a part r of the time is computed at a rate of at least (1 - r) / (1 / v + patience_s), whatever is
   evicted and wherever requests go.
2. *Room.* The caches together hold the resident tokens, one copy at least, and what each request that is being answered
   has of its own: its question and its answer so far, for the whole of each iteration that makes a token of it.
3. *Iterations.* One with n new tokens, d of them of answers, takes what n tokens take, and the attention of each of the
   d. So large batches make a token cheap, and keep what is answered in the caches for longer.
4. *Time.* Replicas have a second of GPU time a second.

The least GPU time at a rate is then a linear program: how often iterations of each size run, and what is resident. Any
prices for room and for prompt tokens give a lower bound on it (weak duality), so the search for the best prices may be
coarse. Where a prompt is cached in part, its cost is concave in that part, and lies above the straight line between
nothing and all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from preble.core.costs.model import CostModel
from preble.errors import ConfigError
from preble.lab.sim.bound.least_costs import LeastCosts
from preble.lab.sim.config import FailureKind, SimConfig
from preble.lab.workloads import Stream

Floats = NDArray[np.float64]
_SECTIONS, _HALVINGS = 20, 20
_GOLDEN = (5**0.5 - 1) / 2
_TOKEN_PRICES = (1.0, 0.95, 0.9, 0.8, 0.65, 0.4, 0.0)
"""Of a prompt's token, as shares of the least that it takes: lower where prompts are too short to fill the batches."""


def carried_rate(streams: Sequence[Stream], config: SimConfig, *, patience_s: float) -> float:
    """Return a rate, in requests/s of all streams, above which no placement and no order carries them in steady state.

    `patience_s`: nobody waits longer for a first token. The streams' populations stay as they are or are renewed piece
    by piece: no flips, no sessions, no beginning and no end. O(prefixes + profile points x requests that run).

    Raises: ConfigError: another kind of stream, no replica, or a request that no replica can hold.
    """
    supply = _speed(config)
    low, high = 0.0, 1.0
    while least_gpu_s(high, streams, config, patience_s=patience_s) <= supply:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if least_gpu_s(middle, streams, config, patience_s=patience_s) <= supply:
            low = middle
        else:
            high = middle
    return high


def least_gpu_s(rps: float, streams: Sequence[Stream], config: SimConfig, *, patience_s: float) -> float:
    """Return the GPU seconds a second, of replicas of speed 1, that `rps` requests a second take at least.

    Raises: see `carried_rate`.
    """
    _check(streams, config)
    sizes = _Iterations.of(config)
    total = sum(stream.share for stream in streams)
    demands = [_Demand.of(stream, rps * stream.share / total, config, patience_s) for stream in streams]
    room = sum(config.blocks_of(replica) for replica in _replicas(config)) * config.block_size
    scale = max(1 / room, *(demand.most_saved_s(sizes.token_s) for demand in demands))

    own_tokens = min(demand.least_own_tokens for demand in demands)
    attention_s = min(demand.least_attention_s for demand in demands)

    def value(x: float, token_s: float) -> float:
        """Return the least time where room costs `price` seconds a token and second, and a prompt's token `token_s`."""
        price = scale * x / (1 - x)
        decode_s = sizes.least_decode_s(token_s, price * own_tokens, attention_s)
        return sum(demand.least_s(token_s, price, decode_s, own_tokens, sizes) for demand in demands) - price * room

    return max(_highest(partial(value, token_s=share * sizes.token_s)) for share in _TOKEN_PRICES)


@dataclass(frozen=True, slots=True)
class _Iterations:
    """How long iterations of any size take. `speed`: of the fastest replica, by which its requests hold their room."""

    num_decodes: Floats
    num_tokens: Floats
    seconds: Floats
    token_s: float
    shortest_s: float
    speed: float

    @classmethod
    def of(cls, config: SimConfig) -> _Iterations:
        """Make them of the ends of the profile's pieces alone: between two points all is linear in the tokens."""
        model, budget = CostModel(config.profile), config.max_batch_tokens
        points = [n for n, _ in config.profile.prefill_points if 0 < n < budget] + [budget]
        num_decodes = np.arange(1, config.max_running + 1, dtype=np.float64)[:, None]
        num_tokens = np.maximum(num_decodes, np.array([1, *points], dtype=np.float64)[None, :])
        known = np.array([model.prefill_s(n) for n in range(budget + 1)])
        speed = max(config.speeds.get(replica, 1.0) for replica in _replicas(config))
        seconds = known[num_tokens.astype(int)]
        return cls(num_decodes, num_tokens, seconds, LeastCosts(config).token_s, float(known[1]), speed)

    def least_decode_s(self, token_s: float, own_price: float, attention_s: float) -> float:
        """Return what a token of an answer costs at least, its attention left out: its part of an iteration, and of its
        room.

        `token_s`: what each token of a prompt in the iteration pays. `own_price`: of a request's own tokens, a second.
        """
        lasting_s = (self.seconds + self.num_decodes * attention_s) / self.speed
        paid_s = token_s * (self.num_tokens - self.num_decodes)
        return float((lasting_s * own_price + (self.seconds - paid_s) / self.num_decodes).min())


@dataclass(frozen=True, slots=True)
class _Demand:
    """What one stream asks for, `rps` times a second.

    `asked`: of each prefix, how often a second a token of it is computed while no cache has it. `decode_attention_s`:
    of each token of an answer but the first. `hit_attention_s`: what a hit adds, for each token of the prefix.
    """

    stream: Stream
    rps: float
    asked: Floats
    decode_attention_s: Floats
    hit_attention_s: float

    @classmethod
    def of(cls, stream: Stream, rps: float, config: SimConfig, patience_s: float) -> _Demand:
        popularity = np.arange(1.0, stream.prefixes + 1) ** -stream.zipf
        rates = rps * popularity / popularity.sum()
        p, token_s = config.profile, LeastCosts(config).token_s
        context = stream.prefix_tokens + stream.question_tokens + np.arange(stream.output_tokens - 1, dtype=np.float64)
        again = min(p.attention_s_per_pair + p.attention_s_per_context_token, token_s) * context
        attention = np.minimum(p.decode_s_per_sequence + p.decode_s_per_context_token * context, again)
        hit_s = p.attention_s_per_pair * stream.question_tokens + p.attention_s_per_context_token
        return cls(stream, rps, rates / (1 + rates * patience_s), attention, hit_s)

    @property
    def least_own_tokens(self) -> float:
        return float(self.stream.question_tokens)

    @property
    def least_attention_s(self) -> float:
        return float(self.decode_attention_s.min()) if len(self.decode_attention_s) else 0.0

    def most_saved_s(self, token_s: float) -> float:
        return float(self.asked.max()) * self._saved_s(token_s)

    def least_s(self, token_s: float, price: float, decode_s: float, own_tokens: float, sizes: _Iterations) -> float:
        """Return seconds and room a second, at these prices. `decode_s`: of a token of an answer, which has
        `own_tokens`.
        """
        stream, num_decodes = self.stream, self.stream.output_tokens - 1
        saved_s = self._saved_s(token_s)
        prompt_s = token_s * (stream.prefix_tokens + stream.question_tokens) - saved_s * stream.prefix_tokens
        more_own = num_decodes * (stream.question_tokens - own_tokens + (num_decodes - 1) / 2)
        room_s = price * more_own * sizes.shortest_s / sizes.speed
        answer_s = (num_decodes * decode_s if num_decodes else 0.0) + float(self.decode_attention_s.sum())
        resident_s = stream.prefix_tokens * float(np.minimum(saved_s * self.asked, price).sum())
        return self.rps * (prompt_s + answer_s + room_s) + resident_s

    def _saved_s(self, token_s: float) -> float:
        return max(token_s - self.hit_attention_s, 0.0)


def _highest(value: Callable[[float], float]) -> float:
    """Return the highest value found between 0 and 1 of a concave function: golden section."""
    low, high = 0.0, 1 - 1e-9
    best = max(value(low), value(high))
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_a, at_b = value(a), value(b)
    for _ in range(_SECTIONS):
        best = max(best, at_a, at_b)
        if at_a >= at_b:
            high, b, at_b = b, a, at_a
            a = high - _GOLDEN * (high - low)
            at_a = value(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + _GOLDEN * (high - low)
            at_b = value(b)
    return best


def _replicas(config: SimConfig) -> tuple[str, ...]:
    """Return all replicas that are ever there."""
    joined = (failure.replica for failure in config.failures if failure.kind is FailureKind.ADDED)
    return tuple(dict.fromkeys([*config.initial_replicas, *joined]))


def _speed(config: SimConfig) -> float:
    return sum(config.speeds.get(replica, 1.0) for replica in _replicas(config))


def _check(streams: Sequence[Stream], config: SimConfig) -> None:
    replicas = _replicas(config)
    if not (streams and replicas):
        raise ConfigError(
            f"{len(streams)} streams on {len(replicas)} replicas have no bound; give at least one of each"
        )
    most = max(config.blocks_of(replica) for replica in replicas) * config.block_size
    for stream in streams:
        if stream.turns > 1 or stream.flip_s or stream.from_s or stream.until_s is not None or stream.long_every:
            raise ConfigError(f"stream {stream.name!r} changes or has sessions, for which there is no such bound")
        needed = stream.prefix_tokens + stream.question_tokens + stream.output_tokens - 1
        if needed > most:
            raise ConfigError(
                f"a request of stream {stream.name!r} has {needed} tokens, more than the {most} of a replica"
            )
