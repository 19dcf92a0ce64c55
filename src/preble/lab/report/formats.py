"""Numbers as text, for tables and sentences."""

from __future__ import annotations


def number(value: float) -> str:
    """
    >>> number(9865.04), number(42.94), number(8.564), number(0.0123), number(0.0)
    ('9,865', '42.9', '8.56', '0.012', '0')
    """
    if 0 < abs(value) < 0.1:
        return f"{value:.2g}"
    decimals = 0 if abs(value) >= 100 or value == int(value) else 1 if abs(value) >= 10 else 2
    return f"{value:,.{decimals}f}"


def seconds(value: float) -> str:
    """
    >>> seconds(0.0), seconds(2e-6), seconds(0.1184), seconds(217.169)
    ('0 s', '2 µs', '118 ms', '217 s')
    """
    if value >= 1 or value == 0:
        return f"{number(value)} s"
    return f"{number(value * 1e3)} ms" if value >= 1e-3 else f"{number(value * 1e6)} µs"


def significant(value: float, digits: int) -> str:
    """Round to this many digits, never in exponents.

    >>> significant(123.4, 2), significant(0.04215, 3), significant(1234.5, 3)
    ('120', '0.0421', '1,230')
    """
    return f"{float(f'{value:.{digits}g}'):,g}"
