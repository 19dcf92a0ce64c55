"""How much of what the replicas compute they had computed before."""

from __future__ import annotations

from math import exp


class Recomputation:
    """The share of computed tokens that were known already: the replicas had evicted them, or others cached them.

    What goes into a full cache pushes as much out of it, so this is also how likely what is evicted is to be computed
    again. 0 while nothing has been evicted. It forgets as the caches do: once they have been filled again.
    """

    def __init__(self) -> None:
        self._computed = 0.0
        self._again = 0.0

    @property
    def share(self) -> float:
        """Between 0 and 1."""
        return self._again / self._computed if self._computed > 0 else 0.0

    def note(self, computed_tokens: float, again_tokens: int, capacity_tokens: float) -> None:
        """A request has `computed_tokens` computed, output included; `again_tokens` of its prompt were known.

        `capacity_tokens`: of all caches together.
        """
        kept = exp(-computed_tokens / capacity_tokens)
        self._computed = self._computed * kept + computed_tokens
        self._again = self._again * kept + again_tokens
