"""`/debug`: the last decisions with every candidate, the scheduler's state for each replica, and their parity."""

from __future__ import annotations

from urllib.parse import parse_qs

import msgspec

from preble.core.placing.snapshot import ReplicaState
from preble.decisions.recent import Decision
from preble.engines.adapter import EngineLoad
from preble.errors import RequestError
from preble.gateway.http.page_client import PageClient
from preble.serving import LiveReplica, MemberRow, ParityOutcome, ParityReport, Serving

DEBUG = "/debug/"
PARITY = "/debug/parity"
DEFAULT_LIMIT = 20


class NoDecision(RequestError):
    """No decision for this request is kept any more, or there is no such page."""

    status = 404
    code = "not_found"


class DecisionsPage(msgspec.Struct, frozen=True):
    """`/debug/decisions`: the newest first; `/debug/decisions/ID`: every placement of one request, in order."""

    decisions: list[Decision]


class ReplicaPage(msgspec.Struct, frozen=True):
    """One replica as the scheduler sees it. `drift_*`: over the requests for which it reported cached tokens.

    `engine_load`: the load that the engine reports, with other clients' requests; None where it reports none.
    `has_lost_events`: it reports KV events, but they do not arrive, so its cache is estimated.
    `standing`: "in", or "ejected" or "probing" after it failed requests, was slow or answered nothing.
    `trusted`: whether matches there count. `parity`: the outcome of the last check, None before any.
    """

    replica: str
    engine: str
    version: str | None
    models: tuple[str, ...]
    reports_events: bool
    has_lost_events: bool
    in_flight: int
    engine_load: EngineLoad | None
    load_s: float
    waiting_prefill_tokens: int
    cached_tokens: int
    kv_capacity_tokens: int | None
    drift_requests: int
    drift_predicted_tokens: int
    drift_reported_tokens: int
    standing: str
    trusted: bool
    parity: ParityOutcome | None


class ParityPage(msgspec.Struct, frozen=True):
    """`/debug/parity`: the last report on each live replica that was checked."""

    reports: list[ParityReport]


class ReplicaStatesPage(msgspec.Struct, frozen=True):
    """`/debug/replicas`. `members`: every replica that is watched, whether or not it is up."""

    policy: str
    in_flight: int
    index_bytes: int
    index_tokens: int
    unindexed: int
    replicated_prefixes: int
    replicas: list[ReplicaPage]
    members: list[MemberRow]


class DebugPages:
    """Answers GET requests below `/debug/`, and POST to start a parity check."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def answer(self, client: PageClient) -> None:
        """Raises: RequestError: there is no such page, or the query is invalid."""
        path = client.path
        room, _, rest = path.removeprefix(DEBUG).partition("/")
        page: DecisionsPage | ReplicaStatesPage | ParityPage
        if room == "decisions":
            page = self._of_request(rest) if rest else self._latest(client.head.query)
        elif room == "replicas" and not rest:
            page = self._replicas()
        elif path == PARITY:
            page = ParityPage([r.parity for r in self._serving.replicas.values() if r.parity is not None])
        else:
            raise NoDecision(f"there is no {path[:200]}; there are /debug/decisions[/ID], /debug/replicas and {PARITY}")
        await client.reply_json(200, page)

    async def check_parity(self, client: PageClient) -> None:
        """Check every live replica now; answers with the reports. Raises: ClientGone."""
        with client.unless_gone():
            reports = await self._serving.check_parity()
        await client.reply_json(200, ParityPage(reports))

    def _of_request(self, request_id: str) -> DecisionsPage:
        decisions = self._serving.recent.of_request(request_id)
        if not decisions:
            count = len(self._serving.recent)
            raise NoDecision(
                f"no decision about request {request_id[:200]!r} is kept; the last {count} decisions are."
                " The id is in each answer's x-request-id header"
            )
        return DecisionsPage(decisions)

    def _latest(self, query: bytes) -> DecisionsPage:
        return DecisionsPage(list(self._serving.recent.latest(_limit(query, self._serving.recent.limit))))

    def _replicas(self) -> ReplicaStatesPage:
        scheduler = self._serving.scheduler
        state = scheduler.snapshot()
        return ReplicaStatesPage(
            policy=scheduler.policy.name,
            in_flight=state.num_in_flight,
            index_bytes=state.num_index_bytes,
            index_tokens=state.num_index_tokens,
            unindexed=state.num_unindexed,
            replicated_prefixes=state.num_replicated_prefixes,
            replicas=[
                _replica(one, state.replicas[replica_id], self._serving.standing(replica_id))
                for replica_id, one in self._serving.replicas.items()
            ],
            members=list(self._serving.members),
        )


def _replica(replica: LiveReplica, state: ReplicaState, standing: str) -> ReplicaPage:
    info, spec = replica.info, replica.info.spec
    return ReplicaPage(
        replica=spec.replica_id,
        engine=info.engine,
        version=info.version,
        models=info.models,
        reports_events=spec.reports_events,
        has_lost_events=replica.has_lost_events,
        in_flight=state.num_requests,
        engine_load=replica.engine_load,
        load_s=state.load_s,
        waiting_prefill_tokens=state.waiting_prefill_tokens,
        cached_tokens=state.cached_tokens,
        kv_capacity_tokens=spec.kv_capacity_tokens,
        drift_requests=state.drift.num_requests,
        drift_predicted_tokens=state.drift.predicted_tokens,
        drift_reported_tokens=state.drift.reported_tokens,
        standing=standing,
        trusted=state.trusted,
        parity=replica.parity.outcome if replica.parity is not None else None,
    )


def _limit(query: bytes, most: int) -> int:
    """Return the `limit` in a query.

    Raises: RequestError: not a number from 1 to `most`.

    >>> _limit(b"", 100), _limit(b"limit=7", 100), _limit(b"", 5)
    (20, 7, 5)
    """
    given = parse_qs(query.decode("latin-1")).get("limit")
    if given is None:
        return min(DEFAULT_LIMIT, most)
    text = given[-1]
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:20]) <= most):
        raise RequestError(f"limit={text[:50]} is not a number from 1 to {most}", param="limit")
    return int(text)
