"""How much of each waiting prompt is cached, where asking the engine is too dear to do it for all before each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Waiting = TypeVar("Waiting")


class HitRatioSampler(Generic[Waiting]):
    """Asks before each batch for some requests that are new, and for some of the others in turn.

    In between the last answer holds; a request that was not asked for yet counts as a miss. Deterministic: where
    several ranks of one engine order the same requests, they come to the same order.
    """

    def __init__(self, ask: Callable[[Waiting], int], *, new_per_batch: int, turns_per_batch: int) -> None:
        """`ask`: the cached tokens of a waiting request."""
        self._ask = ask
        self._new_per_batch = new_per_batch
        self._turns_per_batch = turns_per_batch
        self._tokens: dict[str, int] = {}
        """The last answers; whom it was asked for longest ago comes first."""
        self._new_left = 0
        self._turns: frozenset[str] = frozenset()

    def __len__(self) -> int:
        """For how many requests there is an answer."""
        return len(self._tokens)

    def __contains__(self, item: str) -> bool:
        return item in self._tokens

    def new_batch(self) -> None:
        """Call before each batch."""
        self._new_left = self._new_per_batch
        self._turns = frozenset(item for item, _ in zip(self._tokens, range(self._turns_per_batch), strict=False))

    def of(self, item: str, request: Waiting) -> int:
        """The cached tokens of a waiting request, as far as known."""
        if item in self._turns:
            self._tokens.pop(item, None)
        elif item in self._tokens or not self._new_left:
            return self._tokens.get(item, 0)
        else:
            self._new_left -= 1
        tokens = self._tokens[item] = self._ask(request)
        return tokens

    def forget(self, item: str) -> None:
        """It waits no longer."""
        self._tokens.pop(item, None)
