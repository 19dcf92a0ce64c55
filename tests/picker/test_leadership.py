"""One of several pickers holds the lease: against a server that keeps leases as the Kubernetes API does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from preble.config import DiscoveryConfig, GatewayConfig, PickerConfig
from preble.picker.leadership import Leadership, Timing
from support.kubernetes_api import leases_api
from support.waiting import eventually

PATIENT = Timing(lease_s=120, renew_s=90, retry_s=1)
"""However slow the machine is, a leader renews in time."""


@asynccontextmanager
async def candidate(kubeconfig: str, name: str, timing: Timing = PATIENT) -> AsyncIterator[Leadership]:
    """Follows the lease within the context."""
    config = GatewayConfig(
        picker=PickerConfig(lease="epp", namespace="prod"), discovery=DiscoveryConfig(kubeconfig=kubeconfig)
    )
    leadership = Leadership(config, timing)
    leadership.identity = name
    task = asyncio.create_task(leadership.run())
    try:
        yield leadership
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_one_leads_and_when_it_ends_the_other_takes_over(tmp_path: Path) -> None:
    async with leases_api(tmp_path) as (leases, kubeconfig), AsyncExitStack() as stack:
        first = await stack.enter_async_context(candidate(kubeconfig, "a"))
        await eventually(lambda: first.is_leader)
        asked = leases.questions
        async with candidate(kubeconfig, "b") as second:
            await eventually(lambda: leases.questions > asked + 3)
            assert first.is_leader and not second.is_leader
            await stack.aclose()
            await eventually(lambda: second.is_leader)
            assert leases.holder == "b" and not first.is_leader


async def test_a_leader_that_ends_gives_the_lease_back(tmp_path: Path) -> None:
    async with leases_api(tmp_path) as (leases, kubeconfig):
        async with candidate(kubeconfig, "a") as first:
            await eventually(lambda: first.is_leader)
            assert leases.holder == "a"
        assert leases.holder is None and not first.is_leader
        async with candidate(kubeconfig, "b") as second:
            await eventually(lambda: second.is_leader)


async def test_an_api_that_is_away_for_a_moment_costs_no_leader_and_for_long_it_does(tmp_path: Path) -> None:
    soon = Timing(lease_s=4, renew_s=3, retry_s=1)
    async with leases_api(tmp_path) as (leases, kubeconfig), candidate(kubeconfig, "a", soon) as leader:
        await eventually(lambda: leader.is_leader)
        leases.status = 503
        await asyncio.sleep(0)
        assert leader.is_leader, "until renew_s is over"
        await eventually(lambda: not leader.is_leader)
        leases.status = 200
        await eventually(lambda: leader.is_leader)
