"""This gateway's part in its group, on the event loop: it sends what `preble.peers` decides over a bus, such as NATS.

Messages go out as soon as the loop is free; those that come up until then share one packet.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Protocol

import structlog

from preble import background
from preble.config import PeersConfig
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import PeerId
from preble.peers.member import BEAT_S, GroupMember
from preble.peers.packets import (
    MAX_PACKET_BYTES,
    BadPacket,
    Beat,
    Ejected,
    Message,
    PlacedRequest,
    Tokens,
    Used,
    Why,
)
from preble.peers.seal import Seal
from preble.serving.group.shares import Shares


class Bus(Protocol):
    """Carries packets to all other gateways of the group, at most once, each sender's in order.

    It connects in the background, and reconnects whenever the connection is lost.
    """

    @property
    def is_connected(self) -> bool:
        """Whether packets get through now."""

    async def publish(self, packet: bytes) -> None:
        """Send to all others. Drops the packet if it cannot be sent now; raises nothing."""

    async def close(self) -> None:
        """Send what is left, and stop."""


NewBus = Callable[[str, Callable[[bytes], None], Callable[[bool], None]], Bus]
"""Makes a bus from this gateway's name, what to call with each packet of another gateway, and what to call with
`is_connected` whenever that changes. Raises: ConfigError."""


_PACKET_BYTES = MAX_PACKET_BYTES // 2
_ALONE_BEATS = 3
"""If no peer has sent anything for this many beats after we connected, there is none."""
_LOG_S = 60.0
"""Between two lines of the log about packets that were not taken, however many there are."""
_MiB = 1024 * 1024


class Group:
    """The gateways that place for the same cluster. Use within one running event loop.

    `me`: this gateway's name, with a part that is new at each start. `is_warm`: whether it knows what peers have in
    flight and what replicas cache, or has waited for `peers.warm_s`; it stays so. Counts so far: messages `num_told`
    and `num_heard`, `told_bytes`, and packets that were not taken, by the reason, `num_bad`.
    """

    def __init__(
        self,
        config: PeersConfig,
        name: str,
        new_bus: NewBus,
        scheduler: GlobalScheduler,
        shares: Shares,
        on_assumed: Callable[[], None],
        knows_caches: Callable[[], bool],
        keys: tuple[bytes, ...],
    ) -> None:
        """`name`: this gateway's. `new_bus`: makes what carries the packets. `shares`: what else the group shares.
        `on_assumed`: called after each packet of a peer, since the scheduler's next timer may have changed.
        `knows_caches`: whether we know all that the replicas cache. `keys`: of the group's packets.

        Raises: ConfigError: a setting is unusable, or the library is not installed.
        """
        self.me = PeerId(f"{name}/{secrets.token_hex(8)}")
        self.is_warm = False
        self.num_told = self.num_heard = self.told_bytes = 0
        self.num_bad = dict.fromkeys(Why, 0)
        self._seal = Seal(self.me, keys)
        self._log_from = 0.0
        self._log = structlog.get_logger().bind(gateway=self.me)
        self._shares = shares
        self._on_assumed = on_assumed
        self._knows_caches = knows_caches
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Message] = []
        self._is_waiting = asyncio.Event()
        self._member = GroupMember(
            self.me,
            scheduler,
            self._tell,
            budget_bytes=config.prompt_memory_mib * _MiB,
            silent_s=config.silent_s,
        )
        self._peers: frozenset[PeerId] = frozenset()
        self._warm_by = self._loop.time() + config.warm_s
        self._beats_connected = 0
        self._bus = new_bus(self.me, self._take, self._bus_changed)
        scheduler.listen(self._member)
        shares.follow(self._tell)
        self._tasks = [background.keep(self._send, "peers send"), background.keep(self._beat, "peers beat")]

    @property
    def peers(self) -> frozenset[PeerId]:
        """The peers that have sent something lately."""
        return self._member.peers

    @property
    def is_connected(self) -> bool:
        """Whether the bus is connected. Without it, this gateway places on its own."""
        return self._bus.is_connected

    @property
    def num_unknown(self) -> int:
        """Placements so far that named a prompt which this gateway did not know."""
        return self._member.num_unknown

    def change_keys(self, keys: tuple[bytes, ...]) -> None:
        """Seal packets with these keys from now on; see `Seal`."""
        self._seal.change_keys(keys, self._loop.time())

    async def close(self) -> None:
        """Tell the peers that we stop, and leave."""
        await background.end(*self._tasks)
        self._member.leave()
        await self._send_waiting()
        await self._bus.close()

    # what we send

    def _tell(self, message: Message) -> None:
        self._waiting.append(message)
        self._is_waiting.set()

    async def _send(self) -> None:
        while True:
            await self._is_waiting.wait()
            await self._send_waiting()

    async def _send_waiting(self) -> None:
        messages, self._waiting = self._waiting, []
        self._is_waiting.clear()
        start = size = 0
        for end, message in enumerate(messages):
            own = _size(message)
            if size + own > _PACKET_BYTES and end > start:
                await self._publish(messages[start:end])
                start, size = end, 0
            size += own
        await self._publish(messages[start:])

    async def _publish(self, messages: list[Message]) -> None:
        if not messages or not self._bus.is_connected:
            return
        packet = self._seal.seal(tuple(messages), self._loop.time())
        self.num_told += len(messages)
        self.told_bytes += len(packet)
        await self._bus.publish(packet)

    # what we hear

    def _take(self, data: bytes) -> None:
        """Take a packet. One that is malformed, or not of this group, is only counted."""
        now = self._loop.time()
        try:
            packet = self._seal.open(data, now)
        except BadPacket as error:
            self._note_bad(error, now)
            return
        sender = PeerId(packet.sender)
        for message in packet.messages:
            self.num_heard += 1
            if not isinstance(message, Ejected | Used):
                self._member.receive(sender, message, now)
            elif self._member.is_known_to(sender):
                self._shares.take(message, now)
        self._note_peers()
        self._on_assumed()

    def _note_bad(self, error: BadPacket, now: float) -> None:
        self.num_bad[error.why] += 1
        if now >= self._log_from:
            self._log_from = now + _LOG_S
            self._log.warning("peers_bad_packet", error=str(error), count=sum(self.num_bad.values()))

    def _bus_changed(self, is_connected: bool) -> None:
        self._beats_connected = 0
        if is_connected:
            self._log.info("peers_connected")
        else:
            self._log.warning("peers_disconnected", consequence="this gateway places on its own until the bus is back")

    # time

    async def _beat(self) -> None:
        while True:
            self._member.tick(self._loop.time())
            if (used := self._shares.untold()) is not None:
                self._tell(used)
            self._note_peers()
            self._note_warmth()
            await asyncio.sleep(BEAT_S)

    def _note_peers(self) -> None:
        peers = self._member.peers
        for peer in peers - self._peers:
            self._log.info("peer_heard", peer=peer)
        for peer in self._peers - peers:
            self._log.warning("peer_gone", peer=peer)
        self._peers = peers

    def _note_warmth(self) -> None:
        if self.is_warm:
            return
        self._beats_connected += self._bus.is_connected
        has_peers = bool(self._member.peers)
        knows_peers = self._member.is_warm if has_peers else self._beats_connected > _ALONE_BEATS
        if knows_peers and self._knows_caches():
            self.is_warm = True
            self._log.info("peers_warm", peers=len(self._member.peers))
        elif self._loop.time() >= self._warm_by:
            self.is_warm = True
            self._log.warning(
                "peers_cold", consequence="placements may miss what is cached and what peers have in flight"
            )


def _size(message: Message) -> int:
    """Return about how many bytes a message takes in a packet."""
    if isinstance(message, PlacedRequest | Tokens):
        return len(message.tail) + 200
    if isinstance(message, Beat):
        return 5 * (len(message.waiting) + len(message.decoding)) + 2000
    return 100
