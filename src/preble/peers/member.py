"""One gateway of a group: what it tells its peers, and what it learns from them.

It listens to its scheduler and sends each placement with its prompt, each first token and each end at once: peers must
know of a placement before its KV events, which come only after the prefill. It passes what peers send to the scheduler
(`assume`).

Messages may be lost. So each gateway says every second which of its requests are in flight (`Beat`). Peers end requests
that are not among them, and ask for those that they have missed. They forget a gateway that is silent for long, with
its requests. A gateway that is heard for the first time, or again, gets everything in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import PeerId, ReplicaId, ReplicaSpec, Request, RequestId
from preble.core.types.events import (
    PeerHeld,
    PeerPlaced,
    PeerReported,
    ReplicaAdded,
    ReplicaRemoved,
    Reported,
    RequestPlaced,
    SchedulerEvent,
)
from preble.core.types.life import FIRST_TOKEN, Ended, FirstToken, Moved, TransferFailed, Transferred
from preble.peers import packets as m
from preble.peers.packets import Again, Beat, Held, Left, Message, PlacedRequest, Tokens, Unknown
from preble.peers.prompt_book import DEFAULT_BUDGET_BYTES, PromptBook, PromptName

BEAT_S = 1.0
SILENT_S = 5.0
"""After this long without a message a peer is forgotten."""
MOST_PEERS = 64
MOST_IN_FLIGHT = 200_000
"""Of each peer. We ignore what exceeds these limits: it is a mistake, or meant to fill our memory."""
_REMEMBERED_TOKENS = 2**22
"""Of prompts that replicas without KV events computed for us. A new peer gets these, as part of their caches."""
_MOST_ASKED = 256
"""The most requests that one `Again` asks for, and is answered for; the others wait for a later beat."""


@dataclass(slots=True)
class _Own:
    """A request that we placed and reported to our peers. `matched_tokens`: None if unknown. `source`: the replica that
    computes its prompt for the other one; None once it has."""

    number: int
    request: Request
    replica_id: ReplicaId
    matched_tokens: int | None
    source: ReplicaId | None = None
    has_token: bool = False


@dataclass(slots=True)
class _Peer:
    """`live`: its requests in flight here, with their replicas. `elsewhere`: those on unknown replicas."""

    heard_at: float
    live: dict[int, str] = field(default_factory=dict)
    elsewhere: dict[int, str] = field(default_factory=dict)


class GroupMember:
    """Use `scheduler.listen(member)`, `receive` what peers sent, and call `tick` about every `BEAT_S`.

    `me`: a name that no other gateway has or ever had. `send`: called with each message for all peers, in order.
    `num_unknown`: peers' placements so far whose prompt has a name that is unknown here.
    """

    def __init__(
        self,
        me: PeerId,
        scheduler: GlobalScheduler,
        send: Callable[[Message], None],
        *,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        silent_s: float = SILENT_S,
    ) -> None:
        self.me = me
        self.num_unknown = 0
        self._scheduler = scheduler
        self._send = send
        self._silent_s = silent_s
        self._book = PromptBook(budget_bytes)
        self._next_number = 0
        self._own: dict[RequestId, _Own] = {}
        self._numbers: dict[int, _Own] = {}
        self._peers: dict[PeerId, _Peer] = {}
        self._known_to: set[PeerId] = set()
        self._silent: set[ReplicaId] = set()
        """Replicas without KV events."""
        self._computed: deque[_Own] = deque()
        self._computed_tokens = 0

    @property
    def peers(self) -> frozenset[PeerId]:
        """The peers that have sent something lately."""
        return frozenset(self._peers)

    @property
    def is_warm(self) -> bool:
        """Whether every peer has reported what it has in flight."""
        return self._known_to >= self._peers.keys()

    def is_known_to(self, peer: PeerId) -> bool:
        """Return whether the peer has said that it hears this gateway, in this life of it: what it sends is no old
        record.
        """
        return peer in self._known_to

    # -- what the scheduler does --------------------------------------------------------------------------------------

    def on(self, event: SchedulerEvent, now: float) -> None:
        """Tell the peers what happens to our requests. They follow KV events, and check replicas, themselves."""
        match event:
            case RequestPlaced(request, placement):
                self._start(request, placement.replica_id, placement.matched_tokens, placement.prefill_source)
            case Reported(request_id, fact):
                self._report(self._own[request_id], fact)
            case ReplicaAdded(spec):
                self._replica_added(spec)
            case ReplicaRemoved(replica_id):
                self._replica_removed(replica_id)

    def _report(self, own: _Own, fact: Moved | Transferred | TransferFailed | FirstToken | Ended) -> None:
        """Tell the peers: a move as an end and another placement, a first token the first time only.

        Copies they do not hear of: links are each gateway's own.
        """
        if isinstance(fact, Moved):
            self._end(own, Ended())
            self._start(own.request, fact.replica_id, None, None)
        elif isinstance(fact, Ended):
            self._end(own, fact)
            if fact.output_tokens and own.replica_id in self._silent:
                self._remember(own)
        elif isinstance(fact, Transferred | TransferFailed):
            if own.source is not None:
                own.source = None
                if isinstance(fact, TransferFailed):
                    own.matched_tokens = None  # it was said to have what the source was to compute
                self._tell(m.RequestReport(own.number, fact))
        elif not own.has_token:
            own.has_token = True
            self._tell(m.RequestReport(own.number, fact))

    def _remember(self, own: _Own) -> None:
        self._computed.append(own)
        self._computed_tokens += own.request.num_prompt_tokens
        while self._computed_tokens > _REMEMBERED_TOKENS:
            self._computed_tokens -= self._computed.popleft().request.num_prompt_tokens

    def _replica_added(self, spec: ReplicaSpec) -> None:
        """Forget which requests peers have there, so that their next beats make us ask for these again."""
        if not spec.reports_events:
            self._silent.add(spec.replica_id)
        for peer in self._peers.values():
            for number in _on(spec.replica_id, peer.elsewhere):
                del peer.elsewhere[number]

    def _replica_removed(self, replica_id: ReplicaId) -> None:
        """Tell the peers that our requests there ended. Theirs may go on: perhaps only we have lost the replica."""
        self._silent.discard(replica_id)
        self._computed = deque(own for own in self._computed if own.replica_id != replica_id)
        self._computed_tokens = sum(own.request.num_prompt_tokens for own in self._computed)
        for peer in self._peers.values():
            for number in _on(replica_id, peer.live):
                peer.elsewhere[number] = peer.live.pop(number)
        for own in [own for own in self._own.values() if own.replica_id == replica_id]:
            self._end(own, Ended())

    def _start(
        self, request: Request, replica_id: ReplicaId, matched_tokens: int | None, source: ReplicaId | None
    ) -> None:
        own = _Own(self._next_number, request, replica_id, matched_tokens, source)
        self._next_number += 1
        self._own[request.request_id] = self._numbers[own.number] = own
        self._tell_placed(own)

    def _end(self, own: _Own, end: Ended) -> None:
        del self._own[own.request.request_id], self._numbers[own.number]
        self._tell(m.RequestReport(own.number, _without_text(end)))

    def _tell(self, message: Message) -> None:
        if self._peers:  # else nobody hears it; a new peer gets everything
            self._send(message)

    def _tell_placed(self, own: _Own, *, whole: bool = False) -> None:
        if not self._peers:
            return
        request, name = own.request, self._name(own.request, whole=whole)
        self._send(
            PlacedRequest(
                own.number,
                own.replica_id,
                request.num_prompt_tokens,
                own.matched_tokens,
                name.head,
                name.tail,
                request.namespace,
                own.source,
            )
        )
        if own.has_token:
            self._send(m.RequestReport(own.number, FIRST_TOKEN))

    def _name(self, request: Request, *, whole: bool = False) -> PromptName:
        """Return the prompt's name for the next message. Sends the pieces that the name builds on."""
        *before, name = self._book.names(request.prompt, whole=whole)
        for piece in before:
            self._send(Tokens(*piece))
        return name

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Send a beat, and forget the peers that have been silent for too long."""
        for name in [name for name, peer in self._peers.items() if peer.heard_at + self._silent_s <= now]:
            self._forget(name, now)
        self._beat()

    def _beat(self) -> None:
        own = self._numbers.values()
        waiting = tuple(one.number for one in own if not one.has_token)
        decoding = tuple(one.number for one in own if one.has_token)
        self._send(Beat(self._next_number, waiting, decoding, tuple(self._peers)))

    def leave(self) -> None:
        """Tell the peers that we stop."""
        self._send(Left())

    def _forget(self, name: PeerId, now: float) -> None:
        del self._peers[name]
        self._known_to.discard(name)
        self._scheduler.forget_peer(name, now)

    # -- what peers report --------------------------------------------------------------------------------------------

    def receive(self, sender: PeerId, message: Message, now: float) -> None:
        """Take a peer's message. It can add load and cached prefixes here, and end only the peer's own requests."""
        if sender == self.me:
            return
        if isinstance(message, Left):
            if sender in self._peers:
                self._forget(sender, now)
            return
        peer = self._peers.get(sender)
        if peer is None:
            if len(self._peers) >= MOST_PEERS:
                return
            peer = self._meet(sender, now)
        peer.heard_at = now
        match message:
            case Tokens(head, tail):
                self._book.read(PromptName(head, tail))
            case PlacedRequest():
                self._take_placed(sender, peer, message, now)
            case Held(replica, head, tail, namespace):
                prompt = self._book.read(PromptName(head, tail))
                if prompt and sender not in self._known_to:  # else we have heard of it when it was placed
                    self._scheduler.assume(PeerHeld(sender, ReplicaId(replica), prompt, namespace), now)
            case m.RequestReport(number, fact):
                self._take_report(sender, peer, number, fact, now)
            case Beat():
                self._take_beat(sender, peer, message, now)
            case Again(asked, numbers) if asked == self.me:
                for number in list(dict.fromkeys(numbers))[:_MOST_ASKED]:
                    if number in self._numbers:
                        self._tell_placed(self._numbers[number], whole=True)
            case Unknown(heads):
                for head in heads:
                    self._book.doubt(head)

    def _meet(self, sender: PeerId, now: float) -> _Peer:
        """Tell a new or returning peer what we have in flight, and what replicas without KV events computed for us.

        The beat says that we hear the peer, which takes nothing about keys and ejections before.
        """
        peer = self._peers[sender] = _Peer(now)
        self._book.doubt_all()
        for own in self._computed:
            self._send(Held(own.replica_id, *self._name(own.request), own.request.namespace))
        for own in self._numbers.values():
            self._tell_placed(own)
        self._beat()
        return peer

    def _take_placed(self, sender: PeerId, peer: _Peer, message: PlacedRequest, now: float) -> None:
        if len(peer.live) + len(peer.elsewhere) >= MOST_IN_FLIGHT:
            return
        prompt = self._book.read(PromptName(message.head, message.tail))
        if prompt is None:
            self.num_unknown += 1
            self._send(Unknown((message.head,)))
        fact = PeerPlaced(
            ReplicaId(message.replica),
            message.num_prompt_tokens,
            message.matched_tokens,
            prompt,
            message.namespace,
            None if message.source is None else ReplicaId(message.source),
        )
        if self._scheduler.assume(PeerReported(sender, _id(message.number), fact), now):
            peer.live[message.number] = message.replica
        elif message.number not in peer.live:
            peer.elsewhere[message.number] = message.replica

    def _take_report(
        self,
        sender: PeerId,
        peer: _Peer,
        number: int,
        fact: Transferred | TransferFailed | FirstToken | Ended,
        now: float,
    ) -> None:
        if isinstance(fact, Ended):
            fact = _without_text(fact)
            peer.live.pop(number, None)
            peer.elsewhere.pop(number, None)
        self._scheduler.assume(PeerReported(sender, _id(number), fact), now)

    def _take_beat(self, sender: PeerId, peer: _Peer, beat: Beat, now: float) -> None:
        """End the peer's requests that are over, and ask for those that we missed."""
        if self.me in beat.knows:
            self._known_to.add(sender)
        in_flight = {*beat.waiting, *beat.decoding}
        for number in [*peer.live, *peer.elsewhere]:
            if number < beat.next_number and number not in in_flight:
                self._take_report(sender, peer, number, Ended(), now)
        for number in beat.decoding:
            if number in peer.live:
                self._take_report(sender, peer, number, FIRST_TOKEN, now)
        missed = sorted(in_flight - peer.live.keys() - peer.elsewhere.keys())
        room = max(0, MOST_IN_FLIGHT - len(peer.live) - len(peer.elsewhere))  # we would ignore any more
        if (asked := missed[: min(room, _MOST_ASKED)]) and sender in self._known_to:
            self._send(Again(sender, tuple(asked)))


def _without_text(end: Ended) -> Ended:
    """Return the end without its error in words, which is for the log of the gateway that saw it."""
    return Ended(end.outcome, end.status, end.retry_after_s, end.output_tokens, end.cached_tokens)


def _on(replica: str, where: dict[int, str]) -> list[int]:
    return [number for number, there in where.items() if there == replica]


def _id(number: int) -> RequestId:
    return RequestId(str(number))
