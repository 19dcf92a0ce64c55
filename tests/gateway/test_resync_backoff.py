from __future__ import annotations

from itertools import pairwise

from preble.serving.replicas.live import FIRST_WAIT_S, LONGEST_WAIT_S, ResyncBackoff


def test_kv_events_start_over_at_once_and_then_less_and_less_often() -> None:
    backoff = ResyncBackoff()
    restarts = [float(second) for second in range(3000) if backoff.is_due(float(second))]
    waits = [later - earlier for earlier, later in pairwise(restarts)]
    assert restarts[0] == 0.0
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 640.0, 640.0]


def test_after_a_long_quiet_time_the_backoff_starts_again() -> None:
    backoff = ResyncBackoff()
    for second in range(100):
        backoff.is_due(float(second))
    later = 100.0 + 2 * LONGEST_WAIT_S
    assert backoff.is_due(later)
    assert not backoff.is_due(later + FIRST_WAIT_S - 1) and backoff.is_due(later + FIRST_WAIT_S)
