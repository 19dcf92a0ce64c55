"""The picker as a server: streams of gateways, health checks of gateways and Kubernetes, a graceful end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from google.protobuf.message import DecodeError

from preble import background
from preble.errors import BodyTooSlow
from preble.gateway.server import Gateway
from preble.picker import ext_proc
from preble.picker.calls import CallError, CallServer, PickerCall
from preble.picker.endpoints import require_address
from preble.picker.envoy import SERVICE
from preble.picker.handshakes import tls_settings
from preble.picker.http2 import Status
from preble.picker.leadership import Leadership
from preble.picker.picked_request import PickedRequest
from preble.web.server.listening import listen, url_of

ALIVE = ("", "liveness")
READY = ("readiness", SERVICE)
"""Names that the health service knows: SERVING always, and SERVING while gateways may ask."""
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"
"""`grpc.health.v1.HealthCheckResponse`, encoded."""
_LOOK_S = 0.2
"""How often we look whether the health has changed: Kubernetes and gateways ask every second or less."""
MOST_WATCHES = 16
"""The most watches of health on one connection."""
_WRONG_MODE = "set request_body_mode and response_body_mode of the gateway's ext_proc filter to FULL_DUPLEX_STREAMED"


class Picker:
    """A running picker. `port`: the port that gateways ask."""

    def __init__(self, gateway: Gateway, leadership: Leadership | None) -> None:
        self.port = 0
        self._gateway = gateway
        self._leadership = leadership
        self._has_been_ready = False
        self._ends = False
        self._told_ready = False
        """What watches are told. Never what a look has not seen: nobody would hear that it has changed since."""
        self._news = asyncio.Event()
        """Set, and replaced, when the health has changed: one event for all who watch."""

    def waits_for(self) -> str | None:
        """Return why gateways may not ask yet, None if they may.

        A picker that has seen a replica stays ready without one, and answers 503.
        """
        waits_for = self._gateway.serving.waits_for
        self._has_been_ready = self._has_been_ready or waits_for is None
        if not self._has_been_ready:
            return waits_for
        leads = self._leadership is None or self._leadership.is_leader
        return None if leads else "this picker does not hold the lease"

    @property
    def is_ready(self) -> bool:
        """Whether gateways may ask."""
        return self.waits_for() is None and not self._gateway.is_draining

    async def check_health(self, call: PickerCall) -> None:
        """Answer `grpc.health.v1.Health/Check`, by which gateways and Kubernetes ask."""
        health = _health(name := _name_in(await call.read()), is_ready=self.is_ready)
        if health == _SERVICE_UNKNOWN:
            raise CallError(Status.NOT_FOUND, f"there is no service {name[:100]!r}")
        await call.write(health)

    async def watch_health(self, call: PickerCall) -> None:
        """Answer `grpc.health.v1.Health/Watch`: the health now, and whenever it changes, until the picker ends."""
        if call.num_alike >= MOST_WATCHES:
            raise CallError(Status.RESOURCE_EXHAUSTED, f"a connection may watch {MOST_WATCHES} times at once")
        name, told = _name_in(await call.read()), b""
        while not self._ends:
            news = self._news
            if (health := _health(name, is_ready=self._told_ready)) != told:
                await call.write(told := health)
            await news.wait()
        raise CallError(Status.UNAVAILABLE, "the picker ends")

    async def follow_health(self) -> None:
        """Tell all watches when the health changes. Never returns."""
        while True:
            if (is_ready := self.is_ready) != self._told_ready:
                self._told_ready = is_ready
                self._tell_watches()
            await asyncio.sleep(_LOOK_S)

    def end_watches(self) -> None:
        """Refuse to watch while the picker stops: a watch never ends by itself and would delay the end."""
        self._ends = True
        self._tell_watches()

    def _tell_watches(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def process(self, call: PickerCall) -> None:
        """Serve one stream: one request and its answer."""
        body_s = self._gateway.config.timeouts.body_s
        timeout = asyncio.timeout(body_s)
        async with PickedRequest(self._gateway, lambda: timeout.reschedule(None)) as exchange:
            try:
                async with timeout:
                    await self._exchange(exchange, call)
            except TimeoutError:
                await call.write(exchange.timed_out(BodyTooSlow(f"the body did not arrive within {body_s:g} s")))

    async def _exchange(self, exchange: PickedRequest, call: PickerCall) -> None:
        while (encoded := await call.read()) is not None:
            if exchange.has_ended:
                continue  # the gateway ends the stream; what it has sent meanwhile means nothing
            try:
                message = ext_proc.decode(encoded)
                if not ext_proc.is_full_duplex(message):
                    raise CallError(Status.FAILED_PRECONDITION, _WRONG_MODE)
                replies = await exchange.replies(message)
            except DecodeError as error:
                raise CallError(Status.INVALID_ARGUMENT, f"a message cannot be decoded: {error}") from None
            for reply in replies:
                await call.write(reply)


def _health(name: str, *, is_ready: bool) -> bytes:
    if name not in (*ALIVE, *READY):
        return _SERVICE_UNKNOWN
    return _SERVING if name in ALIVE or is_ready else _NOT_SERVING


def _name_in(question: bytes | None) -> str:
    """Return the service that a health question names: its one field, a short text."""
    return (question or b"")[2:].decode("latin-1")


@asynccontextmanager
async def picking(gateway: Gateway) -> AsyncIterator[Picker]:
    """Serve a picker within the context, beside the gateway's own pages.

    Leaving it waits for running requests for `timeouts.shutdown_s`, then aborts them.
    Raises: ConfigError: a setting is unusable, for example the port.
    """
    config = gateway.config
    for replica in config.replicas:
        require_address(replica.url)
    tls = tls_settings(config.picker)
    leadership = Leadership(config) if config.picker.lease is not None else None
    picker = Picker(gateway, leadership)
    gateway.pages.status.waits_for = picker.waits_for
    if leadership is not None:
        read = gateway.serving.telemetry.numbers.read
        read(lambda: [("preble_picker_leading", (), [float(leadership.is_leader)])])
    server = CallServer(
        {
            f"/{SERVICE}/Process": picker.process,
            "/grpc.health.v1.Health/Check": picker.check_health,
            "/grpc.health.v1.Health/Watch": picker.watch_health,
        },
        lambda refusal: gateway.serving.telemetry.numbers.add("preble_picker_refusals_total", str(refusal)),
    )
    sock = listen(config.host, config.picker.port)
    picker.port = sock.getsockname()[1]
    await server.start(sock, tls)
    structlog.get_logger().info("picking", url=url_of(config.host, picker.port), lease=config.picker.lease)
    following = background.keep(leadership.run, "leadership") if leadership is not None else None
    looking = [
        background.keep(server.look_after, "limits of time"),
        background.keep(picker.follow_health, "health watches"),
    ]
    try:
        yield picker
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        picker.end_watches()
        await server.stop(config.timeouts.shutdown_s)
        for task in looking:
            task.cancel()
