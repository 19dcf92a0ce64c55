"""`/v1/models`: what the live replicas serve, in OpenAI's form."""

from __future__ import annotations

import time
from typing import Any

from preble.errors import UnknownModel
from preble.gateway.http.page_client import PageClient
from preble.serving import LiveReplica, Serving

MODELS = "/v1/models"


class ModelPages:
    """Answers GET requests to `MODELS` and below."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._started_at = int(time.time())

    async def list(self, client: PageClient) -> None:
        """Answer with the models that the live replicas serve."""
        data = [self._card(name, replica) for name, replica in sorted(self._serving.replicas.models().items())]
        await client.reply_json(200, {"object": "list", "data": data})

    async def one(self, client: PageClient) -> None:
        """Answer with the model that the path names. Raises: UnknownModel."""
        name = client.path.removeprefix(f"{MODELS}/")
        models = self._serving.replicas.models()
        if name not in models:
            raise UnknownModel(f"no replica serves the model {name[:200]!r}; {MODELS} lists those that are served")
        await client.reply_json(200, self._card(name, models[name]))

    def _card(self, name: str, replica: LiveReplica) -> dict[str, Any]:
        info = replica.info
        roots = dict(zip(info.models, info.roots, strict=False))
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": info.engine,
            "root": roots.get(name, name),
            "parent": info.models[0] if name in info.adapters else None,
            "max_model_len": info.max_model_len,
        }
