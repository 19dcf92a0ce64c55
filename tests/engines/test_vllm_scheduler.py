"""Preble's order inside vLLM: in its own scheduler without a model (`support/inside_vllm.py`).

In a real server: test_waiting_requests.py.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from support.arrangements import assert_cores_order
from support.replicas import ROOT, TEST_TIMEOUT_S, VLLM, require_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(TEST_TIMEOUT_S)]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What the scenarios of `inside_vllm.py` saw, by name."""
    require_vllm()
    program = [str(VLLM.with_name("python")), str(ROOT / "tests" / "support" / "inside_vllm.py")]
    finished = subprocess.run(program, capture_output=True, text=True, check=False, timeout=500)
    assert finished.returncode == 0, finished.stderr[-4000:]
    scenarios: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return scenarios


def test_hits_come_before_misses_and_only_where_it_is_asked_for(seen: dict[str, Any]) -> None:
    as_they_came = ["cold1", "cold2", "mid1", "cold3", "hot1", "hot2", "mid2", "hot3"]
    by_hits = ["hot1", "hot2", "hot3", "mid1", "mid2", "cold1", "cold2", "cold3"]
    assert seen["orders"]["stock"] == seen["orders"]["fcfs"] == as_they_came
    assert seen["orders"]["groups"] == seen["orders"]["default"] == seen["orders"]["lpm"] == by_hits
    assert seen["orders"]["asynchronous"] == by_hits


def test_every_arrangement_is_the_order_of_cores_waiting_queue(seen: dict[str, Any]) -> None:
    assert_cores_order(seen["churn"]["records"])


def test_what_is_remembered_of_the_cache_is_what_vllm_finds(seen: dict[str, Any]) -> None:
    assert seen["churn"]["kind"], "the plain kind of cache"
    answers = [
        (record["told"][name], found)
        for record in seen["churn"]["records"]
        for name, _, found in record["waiting"]
        if name not in record["in_front"]
    ]
    assert [answer for answer in answers if answer[0] != answer[1]] == []
    assert len(answers) > 1000
    assert len(set(answers)) > 10, "different parts of prompts were cached"


def test_120_requests_in_a_tiny_cache_with_aborts_leave_nothing(seen: dict[str, Any]) -> None:
    pressure = seen["pressure"]
    assert pressure["preemptions"] > 10
    assert 80 < pressure["finished"] < 120, "some were aborted, all others got all their tokens"
    assert pressure["used_blocks"] == pressure["left"] == pressure["remembered"] == 0


def test_preempted_requests_stay_in_front_of_better_hits(seen: dict[str, Any]) -> None:
    records = seen["preempted_in_front"]
    assert any(len(record["arranged"]) > len(record["in_front"]) for record in records), "others waited too"
    for record in records:
        assert record["arranged"][: len(record["in_front"])] == record["in_front"]


def test_hits_without_end_do_not_starve_a_miss(seen: dict[str, Any]) -> None:
    groups, lpm = seen["starvation"]["groups"], seen["starvation"]["lpm"]
    assert groups["admitted"][-1] == "miss"
    assert len(groups["admitted"]) <= groups["max_picks"]
    assert "miss" not in lpm["admitted"], "the same hits starve it where the longest prefix always goes first"


def test_models_with_several_kinds_of_layers_are_asked_about_in_turn(seen: dict[str, Any]) -> None:
    hybrid = seen["two_kinds_of_layers"]
    assert hybrid["kind"]
    assert hybrid["asked_at_first"] == 2
    assert hybrid["told"] == hybrid["true"]
    assert [name[:3] for name in hybrid["admitted"]] == ["hot"] * 10 + ["col"] * 10


@pytest.mark.parametrize(
    ("what", "part"),
    [
        ("order", "'fair'"),
        ("table", '{"order": "lpm"}'),
        ("policy", "--scheduling-policy fcfs"),
        ("version", "PREBLE_ANY_ENGINE_VERSION=1"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(seen: dict[str, Any], what: str, part: str) -> None:
    assert part in (seen["refusals"][what] or "it was accepted")
