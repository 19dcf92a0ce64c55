"""A gateway that starts beside a real engine which no longer replays what it has cached learns that from answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from preble.engines.starting.launch import Fleet, LaunchOptions
from preble.engines.starting.ports import free_ports
from support.own_sglang import own_sglang
from support.own_vllm import own_vllm
from support.replicas import TEST_TIMEOUT_S
from support.tiers import PROMPT, WHOLE, cached, gateway_to, loading_profile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]


@pytest.mark.parametrize(
    "own",
    [
        pytest.param(own_vllm, id="vllm", marks=pytest.mark.vllm),
        pytest.param(own_sglang, id="sglang", marks=pytest.mark.sglang),
    ],
)
async def test_what_was_cached_before_the_replay_begins_is_learned_from_answers(
    own: Callable[..., LaunchOptions], tmp_path: Path
) -> None:
    events, replay = free_ports(2)
    forgetful = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
        "buffer_steps": 2,
    }
    async with Fleet(own(tmp_path, "--kv-events-config", json.dumps(forgetful))) as fleet:
        [url] = fleet.urls
        assert (await cached(url, PROMPT))[2] == 0
        for start in range(2000, 2600, 100):
            await cached(url, range(start, start + 70))
        async with gateway_to([url], loading_profile(tmp_path)) as gateway:
            assert (await cached(gateway.url, [*PROMPT, 1]))[1:] == (0, WHOLE), "nobody can have told the gateway"
            assert (await cached(gateway.url, [*PROMPT, 2]))[1:] == (WHOLE, WHOLE)
