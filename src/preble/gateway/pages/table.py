"""Every page by its path and method."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from preble.gateway.http.page_client import PageClient
from preble.gateway.http.refusals import not_allowed
from preble.gateway.pages.debug import DEBUG, PARITY, DebugPages
from preble.gateway.pages.front import Front
from preble.gateway.pages.live import UI, UI_EVENTS, UI_PICTURE, LivePage
from preble.gateway.pages.models import MODELS, ModelPages
from preble.gateway.pages.replicas import DRAIN, REPLICAS, UNDRAIN, ReplicaPages
from preble.gateway.pages.status import HEALTH, METRICS, READY, START, VERSION, StatusPages
from preble.serving import Serving

Handlers = Mapping[str, Callable[[PageClient], Awaitable[None]]]
"""What answers a page, by method; GET answers HEAD, too."""

PATHS = (START, MODELS, *HEALTH, *READY, VERSION, METRICS, REPLICAS, DRAIN, UNDRAIN)
"""The paths of pages, besides the live page's and those below `DEBUG`."""
PROBES = tuple(path.encode() for path in (*HEALTH, *READY))
"""What load balancers and supervisors ask, and get answered however many connections there are."""
FOR_ADMINS = (DEBUG, REPLICAS, UI_EVENTS, UI_PICTURE)
"""How the paths begin that only admins may ask for; with `auth.metrics_need_key`, also `METRICS`."""


class AddedPages(Protocol):
    """Pages of a room above, for admins only."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Their paths, as an answer for an unknown one lists them."""

    def name_of(self, path: str) -> str | None:
        """Return a page as metrics name it: one of few. None for a path that is no page."""

    async def answer(self, method: str, client: PageClient) -> None:
        """Answer a path that has a name. Raises: PrebleError, ClientGone."""


class Pages:
    """Answers what operators and clients ask of the gateway itself. `added`: pages of a room above, None for none.

    `status`: health, readiness, metrics.
    """

    def __init__(self, serving: Serving, front: Front) -> None:
        self.added: AddedPages | None = None
        self.status = status = StatusPages(serving, front)
        models, debug = ModelPages(serving), DebugPages(serving)
        replicas, live = ReplicaPages(serving, front), LivePage(front)
        self._debug: Handlers = {"GET": debug.answer}
        self._model: Handlers = {"GET": models.one}
        self._table: Mapping[str, Handlers] = {
            MODELS: {"GET": models.list},
            **{path: {"GET": status.health} for path in HEALTH},
            **{path: {"GET": status.ready} for path in READY},
            START: {"GET": status.start},
            VERSION: {"GET": status.version},
            METRICS: {"GET": status.metrics},
            UI: {"GET": live.page},
            UI_EVENTS: {"GET": live.watch},
            UI_PICTURE: {"GET": live.picture},
            PARITY: {"GET": debug.answer, "POST": debug.check_parity},
            REPLICAS: {"GET": replicas.list, "POST": replicas.add, "DELETE": replicas.remove},
            DRAIN: {"POST": replicas.drain},
            UNDRAIN: {"POST": replicas.drain},
        }

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths that an answer for an unknown one lists."""
        return (*PATHS, UI, *(self.added.paths if self.added is not None else ()))

    def name_of(self, path: str) -> str | None:
        """Return a page as metrics name it: one of few. None for a path that is no page."""
        if path.startswith(DEBUG):
            return DEBUG
        if path in self._table:
            return REPLICAS if path.startswith(REPLICAS) else path
        return self._added_name(path)

    def is_for_admins(self, path: str) -> bool:
        """Return whether only admins may ask for a page."""
        return path.startswith(FOR_ADMINS) or self._added_name(path) is not None

    async def answer(self, method: str, client: PageClient) -> bool:
        """Answer, if the path is a page's. Return whether it is. Raises: PrebleError, ClientGone."""
        handlers = self._handlers(method, client.path)
        if handlers is not None:
            handler = handlers.get("GET" if method == "HEAD" else method)
            await (handler(client) if handler is not None else not_allowed(client, method, handlers))
        elif self.added is not None and self._added_name(client.path) is not None:
            await self.added.answer(method, client)
        else:
            return False
        return True

    def _handlers(self, method: str, path: str) -> Handlers | None:
        """Return what answers a page of ours, by method. Of paths below `MODELS` only those that are read are pages."""
        if path in self._table:
            return self._table[path]
        if path.startswith(DEBUG):
            return self._debug
        return self._model if path.startswith(f"{MODELS}/") and method in ("GET", "HEAD") else None

    def _added_name(self, path: str) -> str | None:
        return self.added.name_of(path) if self.added is not None else None
