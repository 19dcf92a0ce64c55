"""How a list of prompts shares the tokens of its answer."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from preble.core.types.life import Progress
from preble.serving import Placed, share_usage


@pytest.mark.parametrize(
    ("prompts", "told"),
    [(1, [(7, 3)]), (2, [(3, None), (4, None)]), (3, [(2, None), (2, None), (3, None)])],
)
def test_no_output_token_is_lost(prompts: int, told: list[tuple[int, int | None]]) -> None:
    placed = [Mock(spec=Placed) for _ in range(prompts)]
    share_usage(placed, 7, 3)
    assert [one.report.call_args.args for one in placed] == [(Progress(*tokens),) for tokens in told]
