"""The live stream of a KV event publisher: one connection of the event loop's own, without ZMQ's thread.

So a message costs one turn of the loop, and a quiet replica a sign of life every five seconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from types import TracebackType
from typing import cast
from weakref import WeakKeyDictionary

from preble.background import Backoff
from preble.engines.kv_events.sockets import (
    CANNOT_CONNECT,
    MAX_MESSAGE_BYTES,
    RECONNECT_MAX_S,
    RECONNECT_S,
    KvEventEndpoints,
    KvMessage,
    connected,
    message_of,
)
from preble.engines.kv_events.zmtp import GREETING, PING, NotZmtp, subscriber

QUEUED_MESSAGES = 1024
"""Messages that wait for us before we read no more; then they wait with the publisher. Reading goes on at the half."""

QUEUED_BYTES = 2 * MAX_MESSAGE_BYTES

_CONNECT_TIMEOUT_S = 10.0
_BEAT_S = 5.0
"""After so long in silence we ask for a sign of life. Without that a peer whose machine vanished looks like one with
nothing to say."""
_LOST_AFTER_BEATS = 4


REST_S = 0.05
"""After a connection has brought messages, until it is read again, together with others. Waking up costs several times
as much as a message, and engines publish once an iteration, which takes 5 to 50 ms. Placements do not need them sooner:
what a request computes counts as cached while it runs, and a second longer (`report_grace_s`)."""

_AT_ONCE, _APART_S = 8, 0.001
"""Connections that are read again at once, and the time between two such groups: other tasks go on meanwhile."""


TakeIn = Callable[[Sequence[KvMessage | None]], int]
"""Deals with messages as they arrive, None for one of another form. Returns how many, of the first; the others wait."""


class Subscription:
    """One connection to the live stream. A context manager; ends for good when the connection is lost.

    What is published between a loss and a new connection, perhaps by a new process that counts from 0 again, is
    missing. So whoever loses a connection has to make a new one and catch up.
    """

    def __init__(self, endpoints: KvEventEndpoints) -> None:
        """Connects within a running event loop, and tries again until it can.

        `trouble`: why there is no connection; empty while there is one, and after the peer has ended it.
        """
        self.trouble = "no answer"
        self._endpoint = endpoints.endpoint
        self._topic = endpoints.topic.encode()
        self._loop = asyncio.get_running_loop()
        self._connection: _ZmtpConnection | None = None
        self._messages: deque[KvMessage | None] = deque()
        """None for one that is not of the form that messages have."""
        self._num_bytes = 0
        self._connected = self._lost = self._has_news = False
        self._waiter: asyncio.Future[None] | None = None
        self._take_in: TakeIn | None = None
        self._failure: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = self._wait_until = inf
        self._connecting = self._loop.create_task(self._connect())
        self._connecting.add_done_callback(self._on_connecting_done)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def is_connected(self) -> bool:
        return self._connected

    def is_lost(self) -> bool:
        """Return whether the connection, once made, has broken."""
        return self._lost

    def wake(self) -> None:
        """Make `wait` return."""
        self._has_news = True
        self._end_wait()

    async def wait(self, timeout_s: float | None, take_in: TakeIn | None = None) -> bool:
        """Wait for news: a message, a connection made or lost, or `wake`. Returns False if there is none.

        `take_in`: messages that arrive meanwhile are no news if it deals with them. What it raises, this raises.
        To be called only after `take` and `is_lost` have found nothing more.
        """
        if not self._has_news:
            self._waiter, self._take_in = self._loop.create_future(), take_in
            self._wait_until = inf
            if timeout_s is not None:
                self.wait_on(timeout_s)
            try:
                await self._waiter
            finally:
                self._waiter, self._take_in, self._wait_until = None, None, inf
        if self._failure is not None:
            raise self._failure
        had_news, self._has_news = self._has_news, False
        return had_news

    def wait_on(self, timeout_s: float) -> None:
        """Have the wait that goes on end in this time from now, unless there is news."""
        self._wait_until = self._loop.time() + timeout_s
        self._set_timer()

    def _set_timer(self) -> None:
        """Have the wait end in time. One timer serves many waits: nearly all end by a message, which costs no more."""
        if self._timer is not None:
            if self._timer_at <= self._wait_until:
                return
            self._timer.cancel()
        self._timer_at = self._wait_until
        self._timer = None if self._wait_until == inf else self._loop.call_at(self._wait_until, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._loop.time() >= self._wait_until:
            self._end_wait()
        else:
            self._set_timer()

    def take(self, on_rubbish: Callable[[], None]) -> KvMessage | None:
        """Return the next message that has arrived, or None. Calls `on_rubbish` for each that cannot be decoded."""
        while self._messages:
            message = self._messages.popleft()
            if message is not None:
                self._num_bytes -= len(message.payload)
            if self._connection is not None and self._connection.is_full and not self._is_full(parts=2):
                self._connection.is_full = False
                self._connection.settle()
            if message is not None:
                return message
            on_rubbish()
        return None

    def close(self) -> None:
        self._connecting.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._connection is not None:
            self._connection.abort()

    def on_ready(self) -> None:
        """The connection is made, and the publisher knows what we want."""
        self._connected = True
        self.trouble = ""
        self.wake()

    def on_messages(self, messages: list[list[bytes]]) -> None:
        # A publisher filters by prefix: "kv@a" also brings "kv@ab".
        arrived = [message_of(frames) for frames in messages if frames[0] == self._topic]
        left = arrived[self._num_taken_in(arrived) :]
        if not left:
            return
        self._messages += left
        self._num_bytes += sum(len(message.payload) for message in left if message is not None)
        if self._connection is not None:
            self._connection.is_full = self._is_full()
        self.wake()

    def _num_taken_in(self, arrived: Sequence[KvMessage | None]) -> int:
        """Have those messages dealt with at once that need no more than that; returns how many."""
        if self._take_in is None or self._has_news or self._waiter is None or self._waiter.done():
            return 0
        try:
            return self._take_in(arrived)
        except Exception as error:  # noqa: BLE001 (whoever waits has to know; it is no matter of the connection)
            self._failure = error
            return 0

    def on_end(self) -> None:
        self._lost = self._connected
        self.wake()

    def _is_full(self, parts: int = 1) -> bool:
        return len(self._messages) * parts > QUEUED_MESSAGES or self._num_bytes * parts > QUEUED_BYTES

    def _end_wait(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _on_connecting_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._failure = error  # whoever waits has to know
            self._end_wait()

    async def _connect(self) -> None:
        backoff = Backoff(RECONNECT_S, RECONNECT_MAX_S)
        while not self._connected:
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    new = partial(_ZmtpConnection, self, self._topic)
                    _, self._connection = await connected(self._endpoint, new)
                    await self._connection.is_settled
            except CANNOT_CONNECT as error:
                self.trouble = str(error) or self.trouble
                if self._connection is not None:
                    self._connection.abort()
            if not self._connected:
                await backoff.pause()


class _ZmtpConnection(asyncio.Protocol):
    """Carries bytes between the socket and a `ZmtpPeer`. `is_settled`: ready, or at its end.

    `is_full`: the subscription has enough messages for now. `rests`: it has just brought some. Call `settle` after each
    change of them.
    """

    def __init__(self, subscription: Subscription, topic: bytes) -> None:
        self._subscription = subscription
        self._peer = subscriber(topic, MAX_MESSAGE_BYTES)
        self._loop = asyncio.get_running_loop()
        self._silent_beats = 0
        self._is_reading = True
        self.is_full = self.rests = False
        self.is_settled: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(GREETING)
        self._beat = self._loop.call_later(_BEAT_S, self._on_beat)

    def data_received(self, data: bytes) -> None:
        self._silent_beats = 0
        try:
            messages, answer = self._peer.feed(data)
        except NotZmtp as error:
            self._subscription.trouble = str(error)
            self._transport.abort()
            return
        if answer:
            self._transport.write(answer)
        if self._peer.is_ready and not self.is_settled.done():
            self.is_settled.set_result(None)
            self._subscription.on_ready()
        if messages:
            self._subscription.on_messages(messages)
            self.rests = not self._peer.is_within_message
            if self.rests:
                rests = _rests.get(self._loop) or _rests.setdefault(self._loop, _Rests())
                rests.add(self, self._loop)
            self.settle()

    def connection_lost(self, error: Exception | None) -> None:
        self._beat.cancel()
        if not self.is_settled.done():
            self.is_settled.set_result(None)
        self._subscription.on_end()

    def pause_writing(self) -> None:
        """It asks on and on, and does not read our answers: they must not fill the memory."""
        self._transport.abort()

    def settle(self) -> None:
        """Read, unless the connection rests or the subscription is full."""
        reads = not (self.is_full or self.rests)
        if reads == self._is_reading or self._transport.is_closing():
            return
        self._is_reading = reads
        self._silent_beats = 0
        (self._transport.resume_reading if reads else self._transport.pause_reading)()

    def abort(self) -> None:
        self._transport.abort()

    def _on_beat(self) -> None:
        """Ask a silent peer for a sign of life, and give it up in the end."""
        self._silent_beats += self._is_reading
        if self._silent_beats >= _LOST_AFTER_BEATS:
            self._transport.abort()
            return
        if self._silent_beats and self._peer.is_ready:
            self._transport.write(PING)
        self._beat = self._loop.call_later(_BEAT_S, self._on_beat)


class _Rests:
    """The connections of one event loop that rest. They are read again together."""

    def __init__(self) -> None:
        self._connections: list[_ZmtpConnection] = []

    def add(self, connection: _ZmtpConnection, loop: asyncio.AbstractEventLoop) -> None:
        if not self._connections:
            loop.call_later(REST_S, self._end_some, loop)
        self._connections.append(connection)

    def _end_some(self, loop: asyncio.AbstractEventLoop) -> None:
        ended, self._connections = self._connections[:_AT_ONCE], self._connections[_AT_ONCE:]
        if self._connections:
            loop.call_later(_APART_S, self._end_some, loop)
        for connection in ended:
            connection.rests = False
            connection.settle()


_rests: WeakKeyDictionary[asyncio.AbstractEventLoop, _Rests] = WeakKeyDictionary()
