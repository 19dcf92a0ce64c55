"""The benchmark that compares the gateway with that of an earlier commit: what its ratio says."""

from __future__ import annotations

import pytest

from support.scripts import script


def test_a_ratio_is_that_of_pairs_whatever_slows_both() -> None:
    turns = script("benchmarks/micro/gateway_turns.py")
    row = turns.Turns(turns.WHOLE, [100.0, 900.0, 400.0, 100.0], [110.0, 990.0, 440.0, 110.0])
    assert row.ratio == pytest.approx(1.1)
    assert row.interval() == (pytest.approx(1.1), pytest.approx(1.1))


def test_an_interval_is_as_wide_as_pairs_differ() -> None:
    turns = script("benchmarks/micro/gateway_turns.py")
    after_us = [90.0, 95.0, 98.0, 99.0, 100.0, 101.0, 102.0, 105.0, 110.0]
    low, high = turns.Turns(turns.WHOLE, [100.0] * 9, after_us).interval()
    assert 0.9 <= low < 1.0 < high <= 1.1
