"""The serving room's one front: from requests to placements, for any carrier of bytes."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

import msgspec
import structlog

from preble import background
from preble.config import GatewayConfig, ReplicaConfig
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import ReplicaId
from preble.decisions.recent import RecentDecisions
from preble.discovery import Member, Source, make_source
from preble.errors import ConfigError
from preble.logs import LogLosses
from preble.prompts.tokens import TokenSource, make_token_source
from preble.rules.ejection import Standing
from preble.rules.key_limits import KeyLimits
from preble.serving.group import Group, NatsBus, NewBus, Shares, has_secret, packet_keys
from preble.serving.group.nats import check_settings as check_peers
from preble.serving.intake import Intake
from preble.serving.link.host import Answering, SchedulerSocket
from preble.serving.parity.report import ParityReport
from preble.serving.parity.watch import ParityWatch
from preble.serving.picture import Picture, take_picture
from preble.serving.placements import Dispatcher, Placements
from preble.serving.replicas.clients import server_of
from preble.serving.replicas.members import Members
from preble.serving.replicas.monitor import ReplicaMonitor
from preble.serving.replicas.rotation import Rotation
from preble.serving.requests import InFlightLimit, LocalAdmission
from preble.serving.scheduler_setup import Scheduling, gateway_name, start_scheduling
from preble.serving.telemetry.metrics import Telemetry
from preble.serving.telemetry.numbers import Reading
from preble.serving.telemetry.readings import of_build, of_engines, of_group, of_members, of_queue, of_scheduler
from preble.serving.telemetry.tracing import make_tracing
from preble.serving.turns import Turns

CONFIGURATION = "configuration"
"""The source that the configuration's `replicas` are."""
_EJECTION_CHECK_S = 1.0
_NO_SECRET = "who may publish in NATS may speak for any gateway"


class Serving(Intake):
    """Replicas, token ids and placements. Use it within the event loop that started it.

    `scheduler`: only to be read. `recent`: the last decisions. `group`: the gateways that this one belongs to, None for
    one without peers.

    ```
    serving = await Serving.start(config)
    with serving.ids.taken(headers) as request_id:
        parsed = await serving.parse(endpoint, headers, body, request_id)
        async with serving.admitted(parsed) as parsed:
            placed = await serving.place(await serving.tokenize(parsed), parsed.terms)
            ...  # carry the bytes to placed.engine and back, reporting to `placed`
            placed.end()
    await serving.close()
    ```
    """

    def __init__(
        self,
        config: GatewayConfig,
        scheduling: Scheduling,
        placements: Placements,
        tokens: TokenSource,
    ) -> None:
        """Use `start`."""
        self._dispatcher = dispatcher = Dispatcher(placements, config.retries)
        self._key_limits = KeyLimits()
        self._in_flight_limit = limit = InFlightLimit(config.limits, self._key_limits)
        self._turns = Turns(dispatcher, config.queue, self._key_limits, max_waiting=config.limits.max_in_flight)
        replicas, telemetry = placements.replicas, placements.telemetry
        super().__init__(config, replicas, telemetry, tokens, partial(LocalAdmission, limit), self._turns.place)
        self.scheduler: GlobalScheduler = placements.scheduler
        self.recent: RecentDecisions = scheduling.recent
        self._scheduling = scheduling
        self._placements = placements
        self._rotation = Rotation(placements)
        telemetry.numbers.read(lambda: of_queue(self.num_admitted, self._turns.waiting()))
        reference = tokens if config.tokenizer is not None else None
        self._parity = ParityWatch(
            self._rotation, reference, telemetry, config.parity, sends_ids=config.tokenizing.send_ids
        )
        self.members = Members(placements, self._monitor, config.health)
        telemetry.numbers.read(lambda: of_members(self.members, self.members.sources()))
        self._followed: object = None
        self._began_at = time.time()
        self.group: Group | None = None
        self._socket: SchedulerSocket | None = None
        self._ejecting = background.keep(self._eject_outliers, "ejection")

    @classmethod
    async def start(
        cls,
        config: GatewayConfig,
        scheduler: GlobalScheduler | None = None,
        *,
        log_losses: LogLosses | None = None,
        process: str = "gateway",
        bus: NewBus | None = None,
    ) -> Serving:
        """Load the tokenizer and start to watch the replicas; does not wait until they are up.

        `scheduler`: as configured unless given; one that is given is not logged. `log_losses`: shown in the metrics,
        as is `process`, the name of this one. `bus`: to the peers, None for NATS if `peers.servers` has any.
        Raises: ConfigError: a setting is unusable.
        """
        sources, tracing = _sources(config), make_tracing(config.tracing)
        scheduling = start_scheduling(config, scheduler)
        try:
            telemetry = Telemetry(log_losses, config.metrics, log=config.log, process=process)
            placements = Placements(scheduling.scheduler, telemetry, scheduling.recent, config.ejection)
            replicas = placements.replicas
            telemetry.numbers.read(lambda: of_build(config.policy))
            telemetry.numbers.read(lambda: of_scheduler(scheduling.scheduler, scheduling.log))
            telemetry.numbers.read(lambda: of_engines(replicas))
            tokens = await asyncio.to_thread(make_token_source, config, replicas.engines_for, replicas.suspect)
        except BaseException:
            await scheduling.close()
            raise
        serving = cls(config, scheduling, placements, tokens)
        serving.tracing = tracing
        try:
            serving._join_group(config, bus)
            serving._follow(config, sources)
        except BaseException:
            await serving.close()
            raise
        return serving

    def _join_group(self, config: GatewayConfig, bus: NewBus | None) -> None:
        """Raises: ConfigError: a setting of `peers` is unusable."""
        if bus is None and config.peers.servers:
            bus = partial(NatsBus, config.peers)
            if not has_secret(config):
                hint = "set peers.secret_file, or API keys"
                structlog.get_logger().warning("peers_without_secret", consequence=_NO_SECRET, hint=hint)
        if bus is not None:
            group = Group(
                config.peers,
                gateway_name(config),
                bus,
                self.scheduler,
                Shares(self._placements.ejection, self._key_limits, self._turns.admission),
                self._placements.timer.arm,
                self._has_caught_up,
                packet_keys(config),
            )
            self.group = group
            self.telemetry.numbers.read(lambda: of_group(group))

    def _follow(self, config: GatewayConfig, sources: list[Source]) -> None:
        """Raises: ConfigError: a replica is unusable; then nothing has changed."""
        replicas = [self._with_engine(replica, config) for replica in config.replicas]
        self.members.check(replicas)
        self.members.wanted.set(CONFIGURATION, map(Member, replicas))
        followed = (config.groups, config.discovery, config.engine)
        if followed == self._followed:  # else each change of a key would list all pods anew
            self.members.reconcile()
        else:
            self._followed = followed
            self.members.follow(sources)

    @staticmethod
    def _with_engine(replica: ReplicaConfig, config: GatewayConfig) -> ReplicaConfig:
        return msgspec.structs.replace(replica, engine=replica.engine or config.engine)

    def _monitor(self, replica: ReplicaConfig) -> ReplicaMonitor:
        """Raises: ConfigError: the replica is unusable."""
        return ReplicaMonitor(server_of(self._config, replica), self._rotation, self._config.health, self._parity)

    def reconfigure(self, config: GatewayConfig) -> None:
        """Use other settings from now on, where they can be changed: see `preble.config.reloading`.

        Raises: ConfigError: one is unusable; then nothing has changed.
        """
        sources = _sources(config)
        keys = packet_keys(config) if self.group is not None else ()
        old, self._config = self._config, config
        try:
            self._follow(config, sources)
        except ConfigError:
            self._config = old
            raise
        if self.group is not None:
            self.group.change_keys(keys)
        self.members.configure(config.health)
        self.replica_wait.configure(config.timeouts.no_replica_wait_s)
        self._placements.ejection.configure(config.ejection)
        self._dispatcher.retries.configure(config.retries)
        self._in_flight_limit.configure(config.limits)
        self._turns.configure(config.queue, max_waiting=config.limits.max_in_flight)
        self._parity.configure(config.parity)

    def add_replica(self, replica: ReplicaConfig) -> bool:
        """Watch a replica that an operator names. Return whether it was not wanted before.

        Where a source names the replica too, its URL alone is enough.
        Raises: Conflict: a source names it with other settings. ConfigError: it is unusable.
        """
        named = self.members.wanted.named(replica.url)
        is_bare = replica == ReplicaConfig(replica.url)
        replica = named if is_bare and named is not None else self._with_engine(replica, self._config)
        self.members.check([replica])
        is_new = self.members.wanted.add(replica)
        self.members.reconcile()
        return is_new

    async def _eject_outliers(self) -> None:
        while True:
            await asyncio.sleep(_EJECTION_CHECK_S)
            self._placements.eject_outliers(self._placements.loop.time())

    @property
    def waits_for(self) -> str | None:
        """Why this gateway is not ready yet; None if it is."""
        if (lacks := self.replicas.lacks) is not None:
            return lacks
        if self.group is not None and not self.group.is_warm:
            return "waiting for what is cached, and in flight at other gateways"
        return None

    @property
    def is_settled(self) -> bool:
        """Whether it is ready, and has of each wanted replica what it caches, unless that one cannot be reached."""
        return self.waits_for is None and self.members.are_settled and self._has_caught_up()

    def _has_caught_up(self) -> bool:
        return all(replica.engine.has_caught_up for replica in self.replicas.values())

    def standing(self, replica_id: ReplicaId) -> Standing:
        """Return whether a live replica gets requests. Raises: KeyError: it is not live."""
        return self._placements.ejection.standing(replica_id)

    async def listen(self, path: Path, answer: Answering | None = None) -> None:
        """Let other processes of this user place here, at a Unix socket: docs/reference/scheduler-protocol.md.

        `answer`: to the HTTP requests that they pass on. Raises: ConfigError: the socket cannot be made.
        """
        shared = (self._in_flight_limit, self._turns, self.ids, self.replicas, self._tokens.identity)
        self._socket = await SchedulerSocket.open(path, *shared, self.telemetry.numbers.keep, answer)

    async def exposition(self) -> bytes:
        """Return every metric in Prometheus' text form, summed over this process and its front ends."""
        others = await self._readings()
        self.telemetry.others = lambda: others
        return self.telemetry.exposition()

    async def close(self) -> None:
        """Leave the replicas and write the rest of the decision log. End every placement before."""
        if self._socket is not None:
            self._socket.close()
        self._ejecting.cancel()
        await asyncio.gather(self._ejecting, return_exceptions=True)
        if self.group is not None:
            await self.group.close()
        await self.members.close()
        self._tokens.close()
        self._turns.close()
        self._placements.timer.close()
        await self._scheduling.close()
        await self._close_tracing()

    # for pages

    @property
    def num_in_flight(self) -> int:
        """Placements that have not ended."""
        return len(self._placements.in_flight)

    @property
    def num_waiting(self) -> int:
        """Prompts that wait for their turn."""
        return self._turns.num_waiting

    @property
    def waiting_s(self) -> float:
        """GPU seconds of those prompts, as estimated."""
        return self._turns.waiting_s

    @property
    def num_admitted(self) -> int:
        """Prompts between admission and the end of their answer."""
        return self._in_flight_limit.num_admitted

    async def picture(self) -> Picture:
        """Return everything that the live page shows, as it is now."""
        others = await self._readings()
        return take_picture(self, others, now := time.time(), now - self._began_at)

    async def _readings(self) -> list[list[Reading]]:
        """Return the numbers of the front ends."""
        return await self._socket.readings() if self._socket is not None else []

    async def check_parity(self) -> list[ParityReport]:
        """Check now whether every live replica tokenizes and caches as predicted."""
        return await self._parity.check_all()


def check_settings(config: GatewayConfig) -> None:
    """Make the groups' sources, the tracing and the peers' client, as `Serving.start` does, and connect to nothing.

    Raises: ConfigError: a setting is unusable, or the library that it needs is not installed.
    """
    _sources(config)
    if (tracing := make_tracing(config.tracing)) is not None:
        tracing.close()
    if config.peers.servers:
        check_peers(config.peers)


def _sources(config: GatewayConfig) -> list[Source]:
    """Raises: ConfigError: a group is incomplete, or its library is not installed."""
    groups = (msgspec.structs.replace(group, engine=group.engine or config.engine) for group in config.groups)
    return [make_source(group, config.discovery) for group in groups]
