"""The emulated replica's HTTP interface: the endpoints of vLLM and some of SGLang."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
import structlog

import preble
from preble.emulator.answers.placeholders import EmulatedMedia
from preble.emulator.answers.protocol import AdapterBody, DetokenizeBody, TokenizeBody, decode_body
from preble.emulator.answers.tokenizer import EmulatedTokenizer
from preble.emulator.config import EmulatorConfig
from preble.emulator.engine import EmulatedEngine
from preble.emulator.generating import Generating, Models
from preble.emulator.kv.events import KvEventPublisher, event_source
from preble.emulator.kv.kept import KEPT_PATH, KeptKv, KeptName, address_in
from preble.emulator.kv.p2p_tier import BLOCKS_PATH
from preble.emulator.metrics import MetricsPage
from preble.emulator.pairs.decoding import Decode
from preble.emulator.pairs.roles import OWNER, RolePages
from preble.emulator.pairs.rooms import DEFAULT_BOOTSTRAP_PORT, Prefill
from preble.emulator.web import EmulatorRequest
from preble.errors import RequestError, UnknownModel
from preble.prompts.endpoints import ErrorForm, ErrorStyle, error_form
from preble.web.server.answering import RequestHead
from preble.web.server.awaited import ClientGone
from preble.web.server.connection import ClientConnection

Handler = Callable[[EmulatorRequest], Coroutine[Any, Any, None]]

_log = structlog.get_logger("preble.emulator")


class EmulatorApp:
    """Answers the requests to one emulated replica."""

    def __init__(
        self,
        config: EmulatorConfig,
        profile: str,
        engines: Sequence[EmulatedEngine],
        tokenizer: EmulatedTokenizer,
        media: EmulatedMedia,
        publishers: Sequence[KvEventPublisher],
        role: Prefill | Decode | None = None,
        bootstrap_port: int = DEFAULT_BOOTSTRAP_PORT,
    ) -> None:
        """`engines`: one for each data-parallel rank. `publishers`: as many, or none. `role`: its side of a pair."""
        self._engines = engines
        self._tokenizer = tokenizer
        self._publishers = publishers
        self._models_served = Models(config.model or profile)
        self._topic, self._lease_s = config.events_topic, config.lease_s
        base = self._models_served.base
        self._metrics = MetricsPage(engines, base, config.metrics_block_size or config.block_size, role)
        self._profile = profile
        self._generating = generating = Generating(
            config, f"preble-emulator/{profile}", engines, tokenizer, media, self._models_served, role
        )
        self._routes: Mapping[tuple[str, str], Handler] = {
            ("POST", "/v1/completions"): generating.completions,
            ("POST", "/v1/chat/completions"): generating.chat,
            ("POST", "/v1/messages"): generating.messages,
            ("POST", "/v1/messages/count_tokens"): generating.count_tokens,
            ("POST", "/v1/responses"): generating.responses,
            ("POST", "/generate"): generating.generate,
            ("POST", "/inference/v1/generate"): generating.tokens_in,
            ("POST", "/v1/embeddings"): generating.embeddings,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/load_lora_adapter"): self._load_adapter,
            ("POST", "/v1/unload_lora_adapter"): self._unload_adapter,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._show_metrics,
            ("GET", "/kv_event_sources"): self._kv_event_sources,
            ("GET", "/version"): self._version,
            ("GET", "/server_info"): self._server_info,
            ("GET", BLOCKS_PATH): self._kv_blocks,
            ("POST", KEPT_PATH): self._kept_kv,
        }
        self._owner = "preble-emulator"
        if role is not None:
            self._owner = OWNER
            self._routes = {**self._routes, **RolePages(config, role, engines, publishers, bootstrap_port).routes}

    def accept(self, connection: ClientConnection, head: RequestHead) -> EmulatorRequest:
        """Return what answers a request."""
        return EmulatorRequest(connection, head, self.answer, self._profile)

    async def answer(self, exchange: EmulatorRequest) -> None:
        """Answer one request."""
        path = exchange.path
        handler = self._routes.get((exchange.method, path))
        if handler is None and path.startswith("/v1/responses/"):
            handler = self._generating.stored
        try:
            await (handler or self._refuse)(exchange)
        except RequestError as error:
            style = ErrorStyle.ANTHROPIC if path.startswith("/v1/messages") else ErrorStyle.OPENAI
            await exchange.fail(error_form(error), style)
        except ClientGone:
            _log.debug("client_gone", path=path)

    async def _refuse(self, exchange: EmulatorRequest) -> None:
        is_known = any(path == exchange.path for _, path in self._routes)
        status, code = (405, "method_not_allowed") if is_known else (404, "not_found")
        said = f"{exchange.method} {exchange.path} is not served by an emulated replica"
        await exchange.fail(ErrorForm(status, "invalid_request_error", code, said))

    # --- the small endpoints ---

    async def _tokenize(self, exchange: EmulatorRequest) -> None:
        ids = await self._generating.ids_of(decode_body(await exchange.read(), TokenizeBody))
        answer = {"count": len(ids), "max_model_len": self._engines[0].max_model_len, "tokens": ids, "token_strs": None}
        await exchange.json(answer)

    async def _detokenize(self, exchange: EmulatorRequest) -> None:
        body = decode_body(await exchange.read(), DetokenizeBody)
        self._models_served.require(body.model)
        await exchange.json({"prompt": self._tokenizer.decode(body.tokens)})

    async def _reset_prefix_cache(self, exchange: EmulatorRequest) -> None:
        await exchange.json({"success": all([await engine.reset_cache() for engine in self._engines])})

    async def _models(self, exchange: EmulatorRequest) -> None:
        served = self._models_served
        card = {
            "id": served.base,
            "object": "model",
            "created": int(time.time()),
            "owned_by": self._owner,
            "root": served.base,
            "parent": None,
            "max_model_len": self._engines[0].max_model_len,
        }
        adapters = [{**card, "id": name, "root": name, "parent": served.base} for name in served.adapters]
        await exchange.json({"object": "list", "data": [card, *adapters]})

    async def _load_adapter(self, exchange: EmulatorRequest) -> None:
        name = decode_body(await exchange.read(), AdapterBody).lora_name
        served = self._models_served
        if name in (served.base, *served.adapters):
            raise RequestError(f"The lora adapter {name!r} has already been loaded.", param="lora_name")
        served.adapters.append(name)
        await exchange.whole(f"Success: LoRA adapter '{name}' added successfully.".encode(), b"text/plain")

    async def _unload_adapter(self, exchange: EmulatorRequest) -> None:
        name = decode_body(await exchange.read(), AdapterBody).lora_name
        served = self._models_served
        if name not in served.adapters:
            raise UnknownModel(f"The lora adapter {name!r} cannot be found.", param="lora_name")
        served.adapters.remove(name)
        await exchange.whole(f"Success: LoRA adapter '{name}' removed successfully.".encode(), b"text/plain")

    async def _health(self, exchange: EmulatorRequest) -> None:
        await exchange.whole(b"", b"text/plain")

    async def _show_metrics(self, exchange: EmulatorRequest) -> None:
        await exchange.whole(self._metrics.render(), b"text/plain; version=0.0.4; charset=utf-8")

    async def _kv_event_sources(self, exchange: EmulatorRequest) -> None:
        sources = [publisher.source() for publisher in self._publishers] or [event_source(None, None, self._topic)]
        await exchange.json({str(rank): source for rank, source in enumerate(sources)})

    async def _version(self, exchange: EmulatorRequest) -> None:
        await exchange.json({"version": f"{preble.__version__}+preble-emulator"})

    async def _server_info(self, exchange: EmulatorRequest) -> None:
        """Say how it sends KV: the p2p tier is where this request has come to."""
        host, port = address_in(exchange.headers)
        tiers = [{"type": "p2p", "host": host, "port": port}] if self._engines[0].peers is not None else []
        transfer: dict[str, Any] = {"kv_connector_extra_config": {"secondary_tiers": tiers}}
        if self._engines[0].kept is not None:
            transfer |= {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
            transfer["kv_connector_extra_config"]["kv_lease_duration"] = self._lease_s
        await exchange.json({"vllm_config": {"kv_transfer_config": transfer}})

    async def _kept_kv(self, exchange: EmulatorRequest) -> None:
        name = msgspec.json.decode(await exchange.read(), type=KeptName).name
        kept = self._engines[0].kept
        await exchange.json(kept.take(name) if kept is not None else KeptKv([], is_other=True))

    async def _kv_blocks(self, exchange: EmulatorRequest) -> None:
        await exchange.json(sorted(self._engines[0].scheduler.cached_hashes()))
