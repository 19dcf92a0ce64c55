"""What the core rounds by hand agrees with Python's `round`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from preble.core.placing.in_flight import _rounded


@given(st.one_of(st.floats(0, 1e6), st.integers(0, 10_000).map(lambda n: n / 2)))
def test_a_number_of_tokens_is_rounded_as_python_rounds(number: float) -> None:
    assert _rounded(number) == round(number)
