"""When a replica asks to be asked again."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime


def retry_after_s(header: str) -> float:
    """Return the seconds of a `Retry-After` header, 0 if it has none.

    >>> retry_after_s("30"), retry_after_s(""), retry_after_s("soon"), retry_after_s("Fri, 01 Jan 1999 00:00:00 GMT")
    (30.0, 0.0, 0.0, 0.0)
    """
    if not header:
        return 0.0
    if header.isascii() and header.isdigit():
        return float(header[:9])
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
