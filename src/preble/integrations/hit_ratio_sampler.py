"""How much of each waiting prompt is cached, where asking for all of them before each batch costs too much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Waiting = TypeVar("Waiting")


class HitRatioSampler(Generic[Waiting]):
    """Asks before each batch about some new requests, and about some of the others in turn.

    Between its turns a request keeps its last answer; a request without an answer counts as a miss. Deterministic, so
    that all ranks of one engine arrive at the same order.
    """

    def __init__(self, ask: Callable[[Waiting], int], *, new_per_batch: int, turns_per_batch: int) -> None:
        """`ask` returns the cached tokens of a waiting request."""
        self._ask = ask
        self._new_per_batch = new_per_batch
        self._turns_per_batch = turns_per_batch
        self._tokens: dict[str, int] = {}
        """The last answer for each request, the least recently asked first."""
        self._new_left = 0
        self._turns: frozenset[str] = frozenset()

    def __len__(self) -> int:
        """Return for how many requests there is an answer."""
        return len(self._tokens)

    def __contains__(self, item: str) -> bool:
        return item in self._tokens

    def new_batch(self) -> None:
        """Start a new turn; call it before each batch."""
        self._new_left = self._new_per_batch
        self._turns = frozenset(item for item, _ in zip(self._tokens, range(self._turns_per_batch), strict=False))

    def of(self, item: str, request: Waiting) -> int:
        """Return the cached tokens of a waiting request by its last answer; 0 without one."""
        if item in self._turns:
            self._tokens.pop(item, None)
        elif item in self._tokens or not self._new_left:
            return self._tokens.get(item, 0)
        else:
            self._new_left -= 1
        tokens = self._tokens[item] = self._ask(request)
        return tokens

    def forget(self, item: str) -> None:
        """Forget a request that no longer waits."""
        self._tokens.pop(item, None)
