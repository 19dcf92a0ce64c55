"""The sequences of one replica that decode: what most steps do to them is counting, and that is done for all at once.

A decoding sequence is looked at only when it needs a block, fills one or ends, which is known beforehand: so a step
costs what is due in it, not what runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from preble.core.replica.sequence import Sequence
from preble.core.types import RequestId


class Decoding:
    """Decoding sequences, in the order in which they joined, and a calendar of those that are due.

    A step computes one token of each. `context_tokens`: tokens before those of the next step, of all together.
    """

    __slots__ = ("_due", "_ids", "_num_joined", "_sequences", "_step", "context_tokens")

    def __init__(self) -> None:
        self.context_tokens = 0
        self._step = 0
        self._num_joined = 0
        self._sequences: dict[int, Sequence] = {}
        """By `turn`, which grows."""
        self._due: dict[int, list[tuple[int, Sequence]]] = {}
        """(turn, sequence) by step; one that has left since is passed over."""
        self._ids: tuple[RequestId, ...] | None = ()

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def ids(self) -> tuple[RequestId, ...]:
        """Who decodes. O(1) if nobody joined or left since it was asked last, else O(sequences)."""
        if self._ids is None:
            self._ids = tuple([sequence.request.request_id for sequence in self._sequences.values()])
        return self._ids

    @property
    def newest(self) -> Sequence:
        """The one that joined last. Raises: StopIteration: nobody decodes."""
        return next(reversed(self._sequences.values()))

    def join(self, sequence: Sequence) -> None:
        """It takes part from the next step on. O(1)."""
        self._num_joined += 1
        sequence.turn = self._num_joined
        sequence.decode_from(self._step)
        self._sequences[sequence.turn] = sequence
        self.context_tokens += sequence.num_computed
        self._ids = None
        self._plan(sequence, self._step)

    def leave(self, sequence: Sequence) -> None:
        """It takes part no longer, if it did; its counts are brought up to date. O(1)."""
        if self._sequences.pop(sequence.turn, None) is None:
            return
        sequence.settle(self._step)
        self.context_tokens -= sequence.num_computed
        self._ids = None

    def due(self) -> Iterator[Sequence]:
        """Those that need more than counting in the next step, in order, their counts brought up to date.

        Some may leave meanwhile. What is yielded is not due again until it is planned.
        """
        for turn, sequence in sorted(self._due.pop(self._step, ())):
            if turn in self._sequences:
                sequence.settle(self._step)
                yield sequence

    def plan_next(self, sequence: Sequence) -> None:
        """Enter in the calendar when one that was due is due again, after the next step."""
        self._plan(sequence, self._step + 1)

    def step(self) -> int:
        """Everybody gets a token. Returns the context that this takes, in tokens. O(1)."""
        context_tokens = self.context_tokens
        self.context_tokens += len(self._sequences)
        self._step += 1
        return context_tokens

    def check(self, ending: Collection[Sequence]) -> None:
        """Assert every invariant; `ending`: whom the running step ends. O(sequences); tests only."""
        planned = [(turn, sequence) for entries in self._due.values() for turn, sequence in entries]
        for turn, sequence in self._sequences.items():
            sequence.settle(self._step)
            assert sequence.turn == turn and sequence.runs
            assert planned.count((turn, sequence)) == (sequence not in ending), "the calendar is wrong"
        assert list(self._sequences) == sorted(self._sequences)
        assert self.context_tokens == sum(sequence.num_computed for sequence in self)
        assert self.ids == tuple(sequence.request.request_id for sequence in self)
        assert min(self._due, default=self._step) >= self._step, "something due was passed over"

    def _plan(self, sequence: Sequence, step: int) -> None:
        self._due.setdefault(sequence.next_due(step), []).append((sequence.turn, sequence))
