"""Gateways of a group as processes, under load: killed, cut off, restarted. benchmarks/repro/gateway_group.py."""

from __future__ import annotations

import pytest

from support.scripts import script
from support.servers import require_server


@pytest.mark.slow
@pytest.mark.parametrize("what", ["killed", "partitioned", "restarted"])
async def test_nothing_is_lost_but_what_a_killed_gateway_held_and_nothing_stays_in_flight(what: str) -> None:
    require_server("nats", "nats-server")
    made = await script("benchmarks/repro/gateway_group.py").trial(what, rate=6.0, seconds=4.0, warm_s=1.0)
    assert made.requests > 20
    assert made.lost == 0
    assert (made.in_hands == 0) or what == "killed"
    assert (made.left_in_flight, made.left_assumed) == (0, 0)


def test_the_kept_result_holds_and_the_page_shows_it() -> None:
    bench = script("benchmarks/repro/gateway_group.py")
    trials = bench.read()
    assert [one.what for one in trials] == list(bench.TRIALS)
    for one in trials:
        assert (one.lost, one.left_in_flight, one.left_assumed) == (0, 0, 0)
    before, after = next(one.phases for one in trials if one.what == "killed")
    assert abs(before.hit_rate - after.hit_rate) <= 0.02
    page = bench.PAGE.read_text(encoding="utf-8")
    assert bench.filled(page, bench.drawn(trials)) == page, "python benchmarks/repro/gateway_group.py --draw"
