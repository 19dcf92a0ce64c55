"""Placements whose carrier is elsewhere: it has a name for each, and reports facts over a network.

Whoever holds them ends them when the carrier is gone: when its connection ends, or when a lease is not renewed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Generic, TypeVar

import msgspec

from preble.core.types import Placement
from preble.core.types.life import (
    FIRST_TOKEN,
    Ended,
    FirstToken,
    Lost,
    Moved,
    Outcome,
    Progress,
    Report,
    TransferFailed,
    Transferred,
)
from preble.engines import Engine
from preble.serving.placed import Placed, share_usage


class HeldRequest:
    """A request placed for a carrier elsewhere, with its placements: a list of prompts has several, on one replica.

    `has_begun`: whether the prompt is computed. `heard_at`: when the carrier last got anything of the answer, None
    before. `loss`: why the replica has left the rotation, None while it is there. An answer may come all the same.
    """

    def __init__(self, placed: Sequence[Placed]) -> None:
        self.placed = placed
        self.has_begun = False
        self.heard_at: float | None = None
        self.loss: Lost | None = None
        for one in placed:
            one.carried_by(self)

    @property
    def placement(self) -> Placement:
        """Where the request goes, and why."""
        return self.placed[0].placement

    @property
    def engine(self) -> Engine:
        """The client of that replica: its URL, its data-parallel rank."""
        return self.placed[0].engine

    @property
    def output_tokens(self) -> int:
        """As last reported."""
        return sum(one.progress.output_tokens for one in self.placed)

    def lost(self, loss: Lost) -> None:
        """See `Carrier`. A source is nothing to this one, which is asked alone."""
        if not loss.of_source:
            self.loss = loss

    def report(self, fact: Report, now: float) -> None:
        """Take what the carrier reports. Any output means that the prompt is computed.

        Raises: NoReplicaError: it has moved to a replica that is not live.
        """
        if isinstance(fact, FirstToken) or (isinstance(fact, Progress) and fact.output_tokens):
            self._begin(now)
        if isinstance(fact, Progress | Ended) and fact.output_tokens is not None:
            share_usage(self.placed, fact.output_tokens, fact.cached_tokens)
        if isinstance(fact, Moved):
            for one in self.placed:
                if one.placement.replica_id != fact.replica_id:
                    one.report(fact)
        elif isinstance(fact, Transferred | TransferFailed):
            for one in self.placed:
                one.report(fact)
        elif isinstance(fact, Ended):
            end = msgspec.structs.replace(fact, output_tokens=None, cached_tokens=None)
            with ExitStack() as ends:  # all of them end, whichever fails
                for one in self.placed:
                    ends.callback(one.report, end)

    def _begin(self, now: float) -> None:
        self.heard_at = now
        if not self.has_begun:
            self.has_begun = True
            for one in self.placed:
                one.report(FIRST_TOKEN)


Name = TypeVar("Name", int, str)
H = TypeVar("H", bound=HeldRequest)


class HeldPlacements(Mapping[Name, H], Generic[Name, H]):
    """What one carrier, or all with a lease, have been given: by name, until it ends. Each ends exactly once.

    `on_over`: called once for each, after its end, with what ended it.
    """

    def __init__(self, on_over: Callable[[H, Ended], None] = lambda held, end: None) -> None:
        self._on_over = on_over
        self._held: dict[Name, H] = {}

    def __getitem__(self, name: Name) -> H:
        return self._held[name]

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[Name]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, name: Name, held: H) -> None:
        """Hold a placed request, whose name must be free."""
        assert name not in self._held
        self._held[name] = held

    def report(self, name: Name, fact: Report, now: float) -> H:
        """Take what a carrier reports. Raises: KeyError: it has ended, or was never there. As `HeldRequest.report`."""
        held = self[name]
        if isinstance(fact, Ended):
            del self._held[name]
            try:
                held.report(fact, now)
            finally:
                self._on_over(held, fact)
        else:
            held.report(fact, now)
        return held

    def end_all(self, now: float) -> None:
        """End everything: the carrier is gone. Raises: what one of the ends raises, after the others have ended too."""
        with ExitStack() as ends:
            for name in list(self._held):
                ends.callback(self.report, name, Ended(Outcome.ABORTED), now)
