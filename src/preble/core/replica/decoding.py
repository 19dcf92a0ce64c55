"""The decoding sequences of one replica, counted together.

In most steps a decoding sequence only gets one token longer. When it will need a block, fill one or end is known
beforehand. So a calendar says which sequences are due in which step, and a step costs what is due in it, not what runs.
This is for the speed of the simulator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from preble.core.replica.sequence import Sequence
from preble.core.types import RequestId


class Decoding:
    """Decoding sequences, in the order in which they joined, and a calendar of those that are due.

    A step computes one token of each. `context_tokens`: the context of the next step, summed over the sequences.
    """

    __slots__ = ("_due", "_ids", "_num_joined", "_sequences", "_step", "context_tokens")

    def __init__(self) -> None:
        self.context_tokens = 0
        self._step = 0
        self._num_joined = 0
        self._sequences: dict[int, Sequence] = {}
        """By `turn`, which grows."""
        self._due: dict[int, list[tuple[int, Sequence]]] = {}
        """(turn, sequence) by step; a sequence that has left since is skipped."""
        self._ids: tuple[RequestId, ...] | None = ()

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def ids(self) -> tuple[RequestId, ...]:
        """The decoding requests. O(1) if none has joined or left since the last call, else O(sequences)."""
        if self._ids is None:
            self._ids = tuple([sequence.request.request_id for sequence in self._sequences.values()])
        return self._ids

    @property
    def newest(self) -> Sequence:
        """The sequence that joined last. Raises: StopIteration: none decodes."""
        return next(reversed(self._sequences.values()))

    def join(self, sequence: Sequence) -> None:
        """Let a sequence decode from the next step on. O(1)."""
        self._num_joined += 1
        sequence.turn = self._num_joined
        sequence.decode_from(self._step)
        self._sequences[sequence.turn] = sequence
        self.context_tokens += sequence.num_computed
        self._ids = None
        self._plan(sequence, self._step)

    def leave(self, sequence: Sequence) -> None:
        """Stop decoding a sequence, if it does; its counts are brought up to date. O(1)."""
        if self._sequences.pop(sequence.turn, None) is None:
            return
        sequence.settle(self._step)
        self.context_tokens -= sequence.num_computed
        self._ids = None

    def due(self) -> Iterator[Sequence]:
        """Yield the sequences that need more than counting in the next step, in order, with current counts.

        The caller may let others leave meanwhile. A yielded sequence is due again only once it is planned.
        """
        for turn, sequence in sorted(self._due.pop(self._step, ())):
            if turn in self._sequences:
                sequence.settle(self._step)
                yield sequence

    def plan_next(self, sequence: Sequence) -> None:
        """Plan when a sequence that was due is due again, after the next step."""
        self._plan(sequence, self._step + 1)

    def step(self) -> int:
        """Give each sequence a token. Returns their context before it, in tokens. O(1)."""
        context_tokens = self.context_tokens
        self.context_tokens += len(self._sequences)
        self._step += 1
        return context_tokens

    def check(self, ending: Collection[Sequence]) -> None:
        """Assert every invariant; `ending`: the sequences that the running step ends. O(sequences); tests only."""
        planned = [(turn, sequence) for entries in self._due.values() for turn, sequence in entries]
        for turn, sequence in self._sequences.items():
            sequence.settle(self._step)
            assert sequence.turn == turn and sequence.runs
            assert planned.count((turn, sequence)) == (sequence not in ending), "the calendar is wrong"
        assert list(self._sequences) == sorted(self._sequences)
        assert self.context_tokens == sum(sequence.num_computed for sequence in self)
        assert self.ids == tuple(sequence.request.request_id for sequence in self)
        assert min(self._due, default=self._step) >= self._step, "something due was skipped"

    def _plan(self, sequence: Sequence, step: int) -> None:
        self._due.setdefault(sequence.next_due(step), []).append((sequence.turn, sequence))
