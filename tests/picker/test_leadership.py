"""One of several pickers holds the lease: against a server that keeps leases as the Kubernetes API does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from preble import background
from preble.config import DiscoveryConfig, GatewayConfig, PickerConfig
from preble.picker.leadership import Leadership, Timing
from support.kubernetes_api import KubernetesApi, kubernetes_api
from support.waiting import eventually

PATIENT = Timing(lease_s=120, look_s=1)
"""However slow the machine is, a leader renews in time."""
SOON = Timing(lease_s=3, look_s=1)
"""A lease expires within the test. `test_pickers_that_share_a_lease.py` runs the times that are shipped."""


@asynccontextmanager
async def leases_api(folder: Path) -> AsyncIterator[tuple[KubernetesApi, str]]:
    async with kubernetes_api("leases", folder, writable=True) as found:
        yield found


def spec(api: KubernetesApi) -> dict[str, Any]:
    return api.objects["epp"]["spec"] if api.objects else {}


@asynccontextmanager
async def candidate(kubeconfig: str, name: str, timing: Timing = PATIENT) -> AsyncIterator[Leadership]:
    """Follows the lease within the context."""
    config = GatewayConfig(
        picker=PickerConfig(lease="epp", namespace="prod"), discovery=DiscoveryConfig(kubeconfig=kubeconfig)
    )
    leadership = Leadership(config, timing)
    leadership.identity = name
    task = background.keep(leadership.run, "leadership")
    try:
        yield leadership
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_one_leads_and_when_it_ends_the_other_takes_over(tmp_path: Path) -> None:
    async with leases_api(tmp_path) as (api, kubeconfig), AsyncExitStack() as stack:
        first = await stack.enter_async_context(candidate(kubeconfig, "a"))
        await eventually(lambda: first.is_leader)
        asked = api.questions
        async with candidate(kubeconfig, "b") as second:
            await eventually(lambda: api.questions > asked + 5)
            assert first.is_leader and not second.is_leader
            await stack.aclose()
            await eventually(lambda: second.is_leader)
            assert spec(api)["holderIdentity"] == "b" and not first.is_leader
            assert spec(api)["leaseTransitions"] == 1


async def test_a_leader_that_ends_gives_the_lease_back(tmp_path: Path) -> None:
    async with leases_api(tmp_path) as (api, kubeconfig):
        async with candidate(kubeconfig, "a") as first:
            await eventually(lambda: first.is_leader)
            assert spec(api)["holderIdentity"] == "a"
        assert "holderIdentity" not in spec(api) and not first.is_leader
        async with candidate(kubeconfig, "b") as second:
            await eventually(lambda: second.is_leader)


async def test_a_lease_has_the_time_in_utc_and_whole_seconds(tmp_path: Path) -> None:
    async with leases_api(tmp_path) as (api, kubeconfig), candidate(kubeconfig, "a") as first:
        await eventually(lambda: first.is_leader)
        renewed = datetime.fromisoformat(spec(api)["renewTime"])
        assert abs(renewed - datetime.now(UTC)) < timedelta(hours=1) and spec(api)["renewTime"].endswith("Z")
        assert spec(api)["leaseDurationSeconds"] == PATIENT.lease_s
        acquired = spec(api)["acquireTime"]
        await eventually(lambda: datetime.fromisoformat(spec(api)["renewTime"]) > renewed)
        assert spec(api)["acquireTime"] == acquired


async def test_a_leader_that_cannot_reach_the_api_goes_on_and_says_so_once(tmp_path: Path) -> None:
    async with leases_api(tmp_path) as (api, kubeconfig), candidate(kubeconfig, "a", SOON) as leader:
        await eventually(lambda: leader.is_leader)
        with capture_logs() as logs:
            api.status = 503
            asked = api.questions
            await eventually(lambda: api.questions > asked + 2 * SOON.lease_s)  # looks, a second apart
            assert leader.is_leader
            api.status = 200
            await eventually(lambda: logs[-1:] != [] and logs[-1]["event"] == "lease_known_again")
        assert [line["event"] for line in logs] == ["lease_unknown", "lease_known_again"]
        assert logs[0]["error"] == "the Kubernetes API answers 503: no" and "goes on leading" in logs[0]["consequence"]


async def test_a_leader_goes_on_and_can_end_while_the_api_takes_requests_and_answers_none(tmp_path: Path) -> None:
    async with leases_api(tmp_path) as (api, kubeconfig), AsyncExitStack() as stack:
        leader = await stack.enter_async_context(candidate(kubeconfig, "a", SOON))
        await eventually(lambda: leader.is_leader)
        with capture_logs() as logs:
            api.answers.clear()
            await eventually(lambda: logs != [])
            assert logs[0]["error"] == "the Kubernetes API does not answer in time" and leader.is_leader
            await stack.aclose()
        assert logs[-1]["event"] == "lease_kept" and not leader.is_leader
        api.answers.set()


async def test_of_two_leaders_the_one_that_was_cut_off_steps_down_when_it_hears_of_the_other(tmp_path: Path) -> None:
    async with leases_api(tmp_path) as (api, kubeconfig), candidate(kubeconfig, "a", SOON) as cut_off:
        await eventually(lambda: cut_off.is_leader)
        api.status = 503
        await eventually(lambda: cut_off._error is not None)
        taken = {**spec(api), "holderIdentity": "b", "leaseDurationSeconds": 3600, "leaseTransitions": 1}
        await api.put({**api.objects["epp"], "spec": taken})
        assert cut_off.is_leader
        api.status = 200
        await eventually(lambda: not cut_off.is_leader)
        assert spec(api)["holderIdentity"] == "b"


async def test_a_change_of_the_lease_by_others_costs_its_holder_nothing(tmp_path: Path) -> None:
    async with leases_api(tmp_path) as (api, kubeconfig), candidate(kubeconfig, "a") as leader:
        await eventually(lambda: leader.is_leader)
        with capture_logs() as logs:
            await api.put({**api.objects["epp"], "metadata": {"name": "epp", "labels": {"by": "others"}}})
            renewed, api.others_write_first = spec(api)["renewTime"], 2
            await eventually(lambda: spec(api)["renewTime"] != renewed)
        assert leader.is_leader and logs == [] and api.others_write_first == 0
        assert api.objects["epp"]["metadata"]["labels"] == {"by": "others"}, "a renewal changes nothing else"


async def test_a_lease_that_nobody_renews_is_taken_over(tmp_path: Path) -> None:
    async with leases_api(tmp_path) as (api, kubeconfig):
        held = {"holderIdentity": "gone", "leaseDurationSeconds": 2, "leaseTransitions": 4}
        head = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "epp"}}
        await api.put({**head, "spec": held})
        async with candidate(kubeconfig, "b", SOON) as second:
            await eventually(lambda: api.questions >= 1)
            await eventually(lambda: second.is_leader)
            assert spec(api)["leaseTransitions"] == 5


async def test_a_token_that_was_renewed_is_read_again_and_a_refused_one_is_named(tmp_path: Path) -> None:
    async with leases_api(tmp_path) as (api, kubeconfig), candidate(kubeconfig, "a") as leader:
        await eventually(lambda: leader.is_leader)
        with capture_logs() as logs:
            api.token = "second"
            await eventually(lambda: logs != [])
            assert logs[0]["error"] == f"the user of the kubeconfig {kubeconfig} was refused (401)"
            (tmp_path / "token").write_text("second")
            await eventually(lambda: logs[-1]["event"] == "lease_known_again")
        assert leader.is_leader and len(logs) == 2
