from __future__ import annotations

from preble.config import RetryConfig
from preble.rules.retries import RetryBudget


def taken(budget: RetryBudget, now: float) -> int:
    """How many retries the budget still allows now; they are used up."""
    count = 0
    while budget.allows_one(now):
        budget.placed_again(now)
        count += 1
    return count


def test_a_few_retries_are_allowed_without_any_requests() -> None:
    assert taken(RetryBudget(RetryConfig(share=0.2, least=5, window_s=10.0)), 0.0) == 5


def test_a_share_of_the_requests_is_allowed_on_top() -> None:
    budget = RetryBudget(RetryConfig(share=0.2, least=5, window_s=10.0))
    for _ in range(100):
        budget.placed(3.0)
    assert taken(budget, 4.0) == 25


def test_requests_and_retries_leave_the_window_as_it_slides() -> None:
    budget = RetryBudget(RetryConfig(share=0.5, least=4, window_s=10.0))
    for _ in range(8):
        budget.placed(9.0)
    assert taken(budget, 9.0) == 8
    assert taken(budget, 15.0) == 2, "half of the last period is left: 4 + 2 allowed, 4 used"
    assert taken(budget, 40.0) == 4


def test_no_retries_at_all_can_be_wanted() -> None:
    budget = RetryBudget(RetryConfig(share=0.0, least=0))
    budget.placed(0.0)
    assert not budget.allows_one(0.0)
