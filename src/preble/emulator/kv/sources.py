"""KV that an emulated replica fetches from another one: copies by the p2p tier, and prompts kept for it by NIXL.

With the traps of vLLM 0.32: where what is fetched is another prompt's by now, the answer is wrong and nobody says so.
What was kept of a shorter prompt ends the engine. Unlike vLLM's, the target computes what is beyond the last whole
block, and forgets wrong KV with the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec

from preble.core.types import TOKEN_BYTES, ReplicaId, Request, RequestId
from preble.emulator.engine import EmulatedEngine
from preble.emulator.generation import Prompt
from preble.emulator.kv.kept import KEPT_PATH, KeptKv, KeptName, address_in
from preble.emulator.kv.p2p_tier import KvTransfer, num_cached_blocks
from preble.engines.http import HttpClient
from preble.errors import EngineError


@asynccontextmanager
async def with_kv(
    engine: EmulatedEngine, params: KvTransfer | None, prompts: Sequence[Prompt]
) -> AsyncIterator[Sequence[Prompt]]:
    """Wait for what others send of these prompts, and give the prompts with it. Stay inside while they run."""
    if params is None or engine.kept is None or not params.do_remote_prefill:
        async with engine.copying(None if params is None else params.remote_kv_source, prompts) as given:
            yield given
        return
    num_blocks = max(len(prompt.tokens) // TOKEN_BYTES for prompt in prompts) // engine.block_size
    if params.remote_num_tokens // engine.block_size < num_blocks:
        raise engine.die(AssertionError("num_decode_blocks <= len(prefill_group)"))
    kept = await _ask_for_kept(params)
    if kept is None:
        yield prompts
        return
    blocks, said = frozenset(kept.blocks), params.remote_prefill_cached_tokens
    await asyncio.sleep(_link_s(engine, prompts[0], blocks))
    yield [replace(one, copied=blocks, said_cached=said, seed=one.seed + kept.is_other) for one in prompts]


def keep(
    engine: EmulatedEngine,
    params: KvTransfer | None,
    prompts: Sequence[Prompt],
    headers: Mapping[bytes, bytes],
    answer: dict[str, Any],
) -> None:
    """Keep what was computed, if `params` asks for that, and say in the whole `answer` how it is fetched."""
    if engine.kept is not None and params is not None and params.do_remote_decode:
        one = prompts[0]
        request = Request(RequestId("kept"), one.tokens, 1, one.namespace)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"] if answer.get("usage") else 0
        answer["kv_transfer_params"] = engine.kept.keep(request, cached, address_in(headers))


def _link_s(engine: EmulatedEngine, prompt: Prompt, blocks: frozenset[int]) -> float:
    """Return how long the prompt's blocks among these take that are not here."""
    here = engine.scheduler.cached_hashes()
    come, had = (num_cached_blocks(prompt.tokens, prompt.namespace, engine.block_size, of) for of in (blocks, here))
    return engine.link_s(max(come - had, 0) * engine.block_size)


async def _ask_for_kept(params: KvTransfer) -> KeptKv | None:
    """Return what a source has kept; None where it cannot be reached."""
    http = HttpClient(f"http://{params.remote_host}:{params.remote_port}", ReplicaId("source"))
    try:
        return (await http.ask(KEPT_PATH, msgspec.json.encode(KeptName(params.remote_request_id)))).decode(KeptKv)
    except EngineError:
        return None
    finally:
        await http.close()
