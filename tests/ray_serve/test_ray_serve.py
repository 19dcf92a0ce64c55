"""Preble's router in real Ray Serve, with emulated replicas: hits, and processes that die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from preble.engines.starting.ports import free_ports
from support.ray_cluster import RayCluster, ray_cluster
from support.servers import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

INSIDE = str(ROOT / "tests" / "support" / "inside_ray.py")
EXAMPLE = str(ROOT / "examples" / "ray_serve" / "ray_example.py")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def direct_cluster() -> Iterator[RayCluster]:
    """Serve's ports are fixed for all of a cluster's life, so HAProxy needs one of its own."""
    ports = [f"RAY_SERVE_{name}_PORT" for name in ("FALLBACK_PROXY_HTTP", "HAPROXY_METRICS", "HAPROXY_STATS")]
    switches = ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY")
    free = dict(zip(("PREBLE_TEST_PORT", *ports), map(str, free_ports(len(ports) + 1)), strict=True))
    with ray_cluster(**free, **dict.fromkeys(switches, "1")) as cluster:
        yield cluster


def test_the_example_shows_more_hits_under_preble_than_under_rays_own_choice(cluster: RayCluster) -> None:
    arguments = ["--requests", "150", "--ingresses", "3", "--json"]
    rays, ours = cluster.run(EXAMPLE, *arguments)
    assert (rays["router"], ours["router"]) == ("Ray's power of two choices", "Preble")
    assert rays["failed"] == ours["failed"] == ours["in_flight"] == ours["unplaced"] == 0
    assert ours["hits"] > rays["hits"] + 0.05
    assert ours["ttft_mean_s"] > 0


def test_every_request_ends_and_none_stays_in_flight_when_a_replica_a_router_and_the_hub_die(
    cluster: RayCluster,
) -> None:
    (seen,) = cluster.run(INSIDE, "kills")
    assert seen["answered"] == 90
    assert seen["survived"] == [], "nothing was killed"
    assert seen["in_flight"] == seen["assumed"] == [0, 0, 0]
    assert seen["running"] == 0


def test_a_wrong_setting_is_refused_before_anything_is_deployed(cluster: RayCluster) -> None:
    (seen,) = cluster.run(INSIDE, "refusals")
    unknown, wrong = seen["said"]
    assert unknown.startswith("PrebleRouter has no setting 'polcy'; it has: policy, profile, tokenizer")
    assert "max_in_flight" in wrong


def test_what_fails_ends_once_with_its_status(tmp_path: Path) -> None:
    (seen,) = RayCluster(tmp_path).run(INSIDE, "failures")
    assert seen["chosen"] == ["one", "one"]
    assert seen["statuses"] == [500, 499, 429, 200, 200]
    assert seen["answered"] == [7, 0], "tokens are counted, of an answer that is kept"
    assert seen["starts"] == 2, "a start that failed is not tried again"


def test_requests_of_one_id_end_each_on_its_own_and_a_replica_that_is_gone_loses_its_load(tmp_path: Path) -> None:
    (seen,) = RayCluster(tmp_path).run(INSIDE, "shared_id")
    assert seen["placed"] == [True, False] and seen["held"] == [True, False] and seen["moved"]
    noticed, unnoticed = [True, False], [False, False]  # whether it is placed again, and still held after that
    assert seen["retried"] == [*noticed, *unnoticed], "a client asks again because its replica has died"


def test_haproxy_asks_one_scheduler_and_engines_report_the_ends(direct_cluster: RayCluster) -> None:
    """Clients that leave and a replica that dies leave nothing in flight."""
    (seen,) = direct_cluster.run(INSIDE, "direct")
    assert seen["first"] == {"answered": 60}
    assert seen["hits"] > 0.3
    assert seen["in_flight"] == 0
    assert seen["survived"] > 0, "the replicas that live answer"
