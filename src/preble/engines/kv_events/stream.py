"""A replica's KV events as a stream without holes: subscribe, catch up, follow, and notice every way to fall behind.

Theory of operation
-------------------
Messages are numbered from 0 by each process of the engine, and the engine keeps the last ones. So being in step means:
the message that we applied last is still message number `last` of the process that is there now. That is what
`_catch_up` checks, by asking for the past messages from `last` on and comparing the first one with what we have:

- the same payload: go on from there; what was missed follows;
- another payload, or none of that number: the engine has restarted, or it no longer keeps what we miss: start over.

It is done at the start, after each lost connection, at each gap in the numbers, whenever a number comes twice with
different payloads, and when the stream falls silent: a message can be lost without any later one to show the gap. While
the silence lasts it is done ever less often, because only a full queue loses messages and nothing fills it then.

The engine keeps only its last messages, and nobody can ask it for the blocks stored before those. So after a start over
there may be blocks below parents that were never heard of. The stream says so (`BlocksStored.past_is_cut`), and the
scheduler finds out from prompts and answers where they belong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

from preble.core.types import EventsLost, KvEvent, ReplicaId
from preble.engines.kv_events.intake import NOTHING_YET, SLICE_S, EventIntake, KvEventCounters, MessageOrder, TimeSlice
from preble.engines.kv_events.sockets import KvEventEndpoints, KvMessage, ReplayUnavailable, replayed
from preble.engines.kv_events.subscription import Subscription

LONGEST_IDLE_CHECK_S = 640.0
"""Between two checks of a stream that stays silent."""

MAX_REPLAYS = 32
"""Replays for one catching-up. Each brings us further, unless the engine talks nonsense."""

Take = Callable[[Sequence[KvEvent]], None]
"""Whoever follows a replica's events: gets changes in their order, all at once that came together."""


class KvReplay:
    """One request for past messages. `complete`: we are in step with the engine afterwards."""

    def __init__(self, intake: EventIntake, stuck_at: int | None) -> None:
        """`stuck_at`: number after which a message was missing before; if it is missing again, it is lost."""
        self._intake = intake
        self._stuck_at = stuck_at
        self.complete = False

    async def run(self, endpoints: KvEventEndpoints, timeout_s: float, take: Take) -> None:
        """Raises: ReplayUnavailable."""
        intake, time_slice = self._intake, TimeSlice()
        in_step = intake.line.is_empty
        async with aclosing(replayed(endpoints, max(intake.line.last or 0, 0), timeout_s)) as messages:
            async for message in messages:
                await time_slice.over()
                verdict = intake.line.judge(message)
                if verdict is MessageOrder.DUPLICATE:
                    in_step = True
                    continue
                if not in_step or verdict is MessageOrder.OTHER_LIFE:
                    take([intake.start_over()])
                    return
                if verdict is MessageOrder.GAP:
                    if intake.line.last != self._stuck_at:
                        return
                    take([intake.start_over()])
                take(await intake.accept(message, is_past=True))
        if not in_step:
            take([intake.start_over()])
            return
        if intake.line.last is None:
            intake.line.last = NOTHING_YET
        self.complete = True


class KvEventStream:
    """The KV events of one replica. Call `follow` once; `close()` ends it."""

    def __init__(
        self,
        replica_id: ReplicaId,
        endpoints: KvEventEndpoints,
        *,
        idle_check_s: float = 10.0,
        replay_timeout_s: float = 10.0,
        lost_after_s: float = 5.0,
        reset_keeps_host: bool = True,
    ) -> None:
        """`idle_check_s`: quiet time after which it first checks that nothing was missed. `replay_timeout_s`: how long
        to wait for each past message. `lost_after_s`: time without a connection after which the events count as lost;
        an engine that is up accepts one at once. `reset_keeps_host`: see `KvTranslation`."""
        self._lost_after_s = lost_after_s
        self._endpoints = endpoints
        self._idle_check_s = idle_check_s
        self._replay_timeout_s = replay_timeout_s
        self._intake = EventIntake(replica_id, reset_keeps_host)
        self._subscription: Subscription | None = None
        self._silence_s = idle_check_s
        self._closed = False
        self._resync = False
        self.has_caught_up = False
        """Whether all that the engine could say of the past has been given once."""

    @property
    def counters(self) -> KvEventCounters:
        return self._intake.counters

    @property
    def position(self) -> int | None:
        """Number of the engine's newest message that has been applied; None or -1 for none."""
        return self._intake.line.last

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """End the stream soon; it closes its sockets itself. May be called twice."""
        self._closed = True
        self._wake()

    def resync(self) -> None:
        """Start over soon: the caller knows that earlier reports are no longer true."""
        self._resync = True
        self._wake()

    def _wake(self) -> None:
        if self._subscription is not None:
            self._subscription.wake()

    async def follow(self, take: Take) -> None:
        """Do as `Engine.follow_kv_events` promises. A block's parent was stored before it, unless the past is cut.

        Nothing that the engine sends makes it raise or end.
        """
        try:
            take([self._intake.start_over(is_past=True)])
            while not self._closed:
                with Subscription(self._endpoints) as self._subscription:
                    if not await self._connected(self._subscription, self._lost_after_s) and not self._closed:
                        take([EventsLost(self._intake.replica_id)])
                        await self._connected(self._subscription, None)
                        take([self._intake.start_over(is_past=True)])
                    await self._follow(self._subscription, take)
                    if self._subscription.is_lost() and self._subscription.trouble:
                        self._say_why("kv_events_given_up", self._subscription)
        finally:
            self._closed = True

    async def _connected(self, subscription: Subscription, timeout_s: float | None) -> bool:
        """Wait until the live stream is there or this one is closed. Returns False if it takes too long."""
        try:
            async with asyncio.timeout(timeout_s):
                while not subscription.is_connected() and not self._closed:
                    await subscription.wait(None)
        except TimeoutError:
            self._say_why("kv_events_not_connected", subscription)
            return False
        return True

    def _say_why(self, event: str, subscription: Subscription) -> None:
        self._intake.say_once(event, endpoint=self._endpoints.endpoint, reason=subscription.trouble)

    async def _follow(self, subscription: Subscription, take: Take) -> None:
        """Do everything from being in step to losing the connection."""
        if self._closed:
            return
        await self._catch_up(take, trust_silence=False)
        self.has_caught_up = True
        self._silence_s, time_slice = self._idle_check_s, TimeSlice()

        def take_in(messages: Sequence[KvMessage | None]) -> int:
            return self._take_in(messages, subscription, time_slice, take)

        while not self._closed and not subscription.is_lost():
            message = subscription.take(self._intake.count_malformed)
            if message is None and not self._resync and await subscription.wait(self._silence_s, take_in):
                continue
            self._silence_s = self._idle_check_s if message else min(2 * self._silence_s, LONGEST_IDLE_CHECK_S)
            await time_slice.over()
            if message is not None and self._follows_on(message) and not subscription.is_lost():
                take(self._intake.accept_small(message))
            else:
                await self._step(subscription, message, take)

    def _take_in(
        self, messages: Sequence[KvMessage | None], subscription: Subscription, time_slice: TimeSlice, take: Take
    ) -> int:
        """Apply messages that have just arrived, while nothing waits before them. Returns how many; the others wait.

        Waking up a task for them would take longer than applying them.
        """
        time_slice.begin(SLICE_S / 2)  # what follows takes as long as what is counted here
        changes: list[KvEvent] = []
        count = 0
        for message in messages:
            if message is None or not self._follows_on(message) or (count and time_slice.is_over()):
                break
            changes += self._intake.accept_small(message)
            count += 1
        if count:
            self._silence_s = self._idle_check_s
            subscription.wait_on(self._silence_s)
            take(changes)
        return count

    def _follows_on(self, message: KvMessage) -> bool:
        """Return whether there is nothing to do about the message but to apply it: nearly always. Saves time alone."""
        if self._resync or self._closed or not self._intake.is_small(message):
            return False
        return self._intake.line.judge(message) is MessageOrder.NEXT

    async def _step(self, subscription: Subscription, message: KvMessage | None, take: Take) -> None:
        """Take one live message after whatever was missed before it; None for a check that nothing was."""
        intake = self._intake
        # A message of a new process can only arrive after the end of the old connection has been noted.
        if subscription.is_lost():
            return
        if self._resync:
            self._resync = False
            take([intake.start_over(is_past=True)])
            intake.line.last = NOTHING_YET
        verdict = intake.line.judge(message) if message else None
        if verdict not in (MessageOrder.NEXT, MessageOrder.DUPLICATE):
            await self._catch_up(take, trust_silence=True)
        if message is not None:
            take(await self._settle(message))

    async def _settle(self, message: KvMessage) -> Sequence[KvEvent]:
        """Apply a live message now that everything before it is there that can still be got."""
        verdict = self._intake.line.judge(message)
        if verdict is MessageOrder.DUPLICATE:
            self._intake.counters.duplicates += 1
            return []
        forgotten = [] if verdict is MessageOrder.NEXT else [self._intake.start_over()]
        return [*forgotten, *await self._intake.accept(message)]

    async def _catch_up(self, take: Take, *, trust_silence: bool) -> None:
        """Get in step with the engine by its past messages; see the head of this module.

        `trust_silence`: where past messages are not available, whether to keep what we have.
        """
        intake = self._intake
        stuck_at: int | None = None
        for _ in range(MAX_REPLAYS):
            before = intake.line.last
            replay = KvReplay(intake, stuck_at)
            try:
                await replay.run(self._endpoints, self._replay_timeout_s, take)
            except ReplayUnavailable as reason:
                if intake.line.last != before:
                    continue  # the end of a long replay can get lost; ask for the rest
                intake.say_once("no_replay", reason=str(reason))
                if not trust_silence and not intake.line.is_empty:
                    take([intake.start_over()])
                return
            if replay.complete:
                return
            stuck_at = intake.line.last if intake.line.last == before else None
        intake.say_once("replay_makes_no_progress", replays=MAX_REPLAYS)
