from __future__ import annotations

import itertools
import math
import random
import re
import statistics
import subprocess
import sys
from collections import Counter

import pytest

from preble.errors import ConfigError
from preble.lab.workloads import make_workload, workload_names
from preble.lab.workloads.arrivals import ARRIVALS, make_arrivals
from preble.lab.workloads.popularity import Zipf
from preble.lab.workloads.tool_use import MAX_TOOL_CHARS, MIN_TOOL_CHARS, SYSTEM_PROMPT, tool_use


@pytest.mark.parametrize("kind", ARRIVALS)
def test_arrivals_start_at_zero_and_never_go_back(kind: str) -> None:
    times = make_arrivals(kind, 200, 5.0, random.Random(1), cv=2.0)
    assert len(times) == 200
    assert times[0] == 0.0
    assert times == sorted(times)


@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("gamma", 1.0), ("gamma", 3.0), ("gamma", 0.3)])
def test_gaps_have_the_mean_and_the_variation_asked_for(kind: str, cv: float) -> None:
    times = make_arrivals(kind, 40_000, 5.0, random.Random(7), cv=cv)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.05)


def test_on_off_arrivals_keep_the_rate_and_the_pauses() -> None:
    times = make_arrivals("onoff", 4000, 10.0, random.Random(1))
    assert len(times) / times[-1] == pytest.approx(10.0, rel=0.1)
    assert all(time_s % 20.0 < 10.0 for time_s in times)
    assert times == sorted(times) and times[0] == 0.0


def test_uniform_arrivals_are_equally_spaced() -> None:
    assert make_arrivals("uniform", 4, 2.0, random.Random(0)) == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize("arguments", [("poison", 5, 1.0), ("poisson", 5, 0.0), ("poisson", 5, math.nan)])
def test_arrivals_that_cannot_be_are_refused(arguments: tuple[str, int, float]) -> None:
    with pytest.raises(ConfigError):
        make_arrivals(*arguments, random.Random(0))


@pytest.mark.parametrize("cv", [0.0, -1.0, math.nan, math.inf])
def test_a_variation_that_cannot_be_is_refused(cv: float) -> None:
    with pytest.raises(ConfigError, match="positive numbers"):
        make_arrivals("gamma", 5, 1.0, random.Random(0), cv=cv)


def test_zipf_picks_in_proportion() -> None:
    zipf, rng = Zipf(10, 1.1), random.Random(3)
    counts = Counter(zipf.pick(rng) for _ in range(50_000))
    weights = [(rank + 1) ** -1.1 for rank in range(10)]
    assert [counts[rank] / 50_000 for rank in range(10)] == pytest.approx(
        [weight / sum(weights) for weight in weights], abs=0.01
    )


@pytest.mark.parametrize(("items", "a"), [(0, 1.0), (3, -0.1), (3, math.nan)])
def test_a_popularity_that_cannot_be_is_refused(items: int, a: float) -> None:
    with pytest.raises(ConfigError, match="at least one item"):
        Zipf(items, a)


def test_tool_use_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    assert tool_use(20, 5) == tool_use(20, 5)
    assert tool_use(20, 5) != tool_use(20, 6)


def test_tool_use_is_the_same_in_another_process() -> None:
    """Nothing in it hangs on hash order, addresses or what was imported before."""
    code = "from preble.lab.workloads.tool_use import tool_use; print([r.prompt() for r in tool_use(40, 5).requests])"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


def test_every_prompt_is_the_system_prompt_a_tool_and_a_question_of_its_own() -> None:
    requests = tool_use(200, 1).requests
    assert {request.segments[0].text for request in requests} == {SYSTEM_PROMPT}
    assert len({request.segments[2].text for request in requests}) == 200
    for request in requests:
        documentation = request.segments[1].text or ""
        assert documentation.startswith(f"## Tool: {request.group}\n") or request.group == "os.path"
        assert MIN_TOOL_CHARS <= len(documentation) <= MAX_TOOL_CHARS


def test_no_documentation_holds_an_address() -> None:
    texts = {request.segments[1].text or "" for request in tool_use(2000, 1, zipf=0.0).requests}
    assert len(texts) == 64
    assert [text for text in texts if re.search(r"0x[0-9a-f]{6,}", text)] == []


def test_the_most_popular_tool_depends_on_the_seed() -> None:
    popular = {Counter(r.group for r in tool_use(300, seed).requests).most_common(1)[0][0] for seed in range(4)}
    assert len(popular) > 1


def test_more_tools_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="not 500; ask for fewer"):
        tool_use(1, 0, num_prefixes=500)


def test_an_unknown_workload_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"neither a file nor one of: .*tool_use"):
        make_workload("tooluse", 3, 0)


def test_a_named_workload_needs_a_number_of_requests() -> None:
    assert "tool_use" in workload_names()
    with pytest.raises(ConfigError, match="give the number of requests"):
        make_workload("tool_use", None, 0)
