"""Preble's router in Ray Serve: the kept result meets the bars, and the page shows it."""

from __future__ import annotations

from support.scripts import script


def test_the_page_shows_the_kept_result() -> None:
    ray_serve = script("benchmarks/repro/ray_serve.py")
    page = ray_serve.PAGE.read_text(encoding="utf-8")
    assert ray_serve.filled(page, ray_serve.drawn(ray_serve.read())) == page, (
        "python benchmarks/repro/ray_serve.py --draw"
    )


def test_three_ingress_replicas_hit_within_two_points_of_one_and_no_request_is_lost() -> None:
    ray_serve = script("benchmarks/repro/ray_serve.py")
    outcomes = ray_serve.read()
    hits = {one["ingresses"]: one["hits"] for one in outcomes if one["router"] == "Preble"}
    assert hits[3] >= hits[1] - ray_serve.BAR
    assert all(one["failed"] == one["in_flight"] == one["unplaced"] == 0 for one in outcomes)
