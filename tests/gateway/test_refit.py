"""The correction of the cost model as the gateway has it: on unless switched off, and to be seen."""

from __future__ import annotations

import msgspec

from gateway.conftest import Serve
from gateway.fakes import replicas
from preble.config import GatewayConfig, ReplicaConfig, SchedulerConfig
from preble.serving.scheduler_setup import scheduler_settings

CONFIG = GatewayConfig(replicas=(ReplicaConfig("http://127.0.0.1:1"),))


def test_the_gateway_corrects_its_cost_model_unless_told_not_to() -> None:
    assert scheduler_settings(CONFIG).refit
    off = msgspec.structs.replace(CONFIG, scheduler=SchedulerConfig(refit=False))
    assert not scheduler_settings(off).refit


async def test_what_the_costs_are_corrected_by_is_a_metric(serve: Serve) -> None:
    async with replicas(1) as fakes, serve(fakes) as gateway:
        metrics = await gateway.metrics()
    assert 'preble_cost_factor{work="prefill"} 1.0' in metrics
    assert 'preble_cost_factor{work="decode"} 1.0' in metrics
