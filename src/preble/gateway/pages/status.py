"""Health, readiness, version, metrics, and where a browser finds the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import preble
from preble.build import commit
from preble.engines.openai import GATEWAY
from preble.gateway.http.page_client import PageClient
from preble.gateway.pages.front import Front
from preble.serving import METRICS_CONTENT_TYPE, Serving

HEALTH = ("/health", "/healthz", "/livez", "/ping")
READY = ("/ready", "/readyz")
VERSION, METRICS, START = "/version", "/metrics", "/"
DOCUMENTATION = "https://github.com/preble-project/preble/tree/main/docs"
_START = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Preble</title>
<h1>Preble</h1><p>One endpoint in front of many LLM replicas: send requests to <code>/v1/chat/completions</code>.</p>
<ul><li><a href="ui">live page</a><li><a href="v1/models">models</a><li><a href="ready">readiness</a>
<li><a href="metrics">metrics</a><li><a href="{DOCUMENTATION}">documentation</a></ul></html>
""".encode()
_START_HEADERS = ((b"content-type", b"text/html; charset=utf-8"), (b"content-security-policy", b"default-src 'none'"))


class StatusPages:
    """Answers GET requests to the paths above. `waits_for`: why requests are not welcome; None if they are."""

    def __init__(self, serving: Serving, front: Front) -> None:
        self.waits_for: Callable[[], str | None] = lambda: serving.waits_for
        self._serving = serving
        self._front = front

    async def start(self, client: PageClient) -> None:
        """Answer a browser, or a health check of `/`, with links to the pages."""
        await client.reply(200, list(_START_HEADERS), _START)

    async def health(self, client: PageClient) -> None:
        """Answer as long as the process does."""
        await client.reply_json(200, {"status": "ok"})

    async def ready(self, client: PageClient) -> None:
        """Answer whether requests are welcome; to an admin, also each replica's state."""
        live = self._serving.replicas.values()
        rows = list(self._serving.members)
        status = "draining" if self._front.is_draining else self.waits_for() or "ready"
        page = {
            "status": status,
            "replicas": len(live),
            "configured": len(rows),
            "untrusted": sum(not replica.trusted for replica in live),
            "states": Counter(row.state for row in rows),
        }
        caller = self._front.keys.caller(client.headers)
        if caller is not None and caller.is_admin:
            page["members"] = {row.url: {"state": row.state, "last_error": row.last_error} for row in rows}
        await client.reply_json(200 if status == "ready" else 503, page)

    async def version(self, client: PageClient) -> None:
        """Answer with the version of Preble, and the commit that it was built from; `server` is for other gateways."""
        await client.reply_json(200, {"server": GATEWAY, "version": preble.__version__, "commit": commit()})

    async def metrics(self, client: PageClient) -> None:
        """Answer with every metric, for Prometheus."""
        exposition = await self._serving.exposition()
        await client.reply(200, [(b"content-type", METRICS_CONTENT_TYPE.encode())], exposition)
