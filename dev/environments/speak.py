"""Messages for whoever waits: what happens, and every 10 seconds that it still happens."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SILENCE_S = 10.0
"""The longest that a run says nothing."""


def say(text: str) -> None:
    """Print one line, whole: several set-ups may run at once."""
    print(text, file=sys.stderr, flush=True)


class Progress:
    """One changing line on a terminal; elsewhere a plain line every SILENCE_S, whether anything has changed or not."""

    def __init__(self, who: str, text: str) -> None:
        """`who`: what is set up, at the head of each line. `text`: what happens first."""
        self._who = who
        self._text: str | Callable[[], str] = text
        self._started = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def show(self, text: str | Callable[[], str]) -> None:
        """Report `text` from now on, or what it returns each time."""
        self._text = text
        if self._terminal:
            self._print()

    def _repeat(self) -> None:
        while not self._ended.wait(1.0 if self._terminal else SILENCE_S):
            self._print()

    def _print(self) -> None:
        text = self._text if isinstance(self._text, str) else self._text()
        line = f"{self._who}: {text} ({time.monotonic() - self._started:.0f} s)"
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
        else:
            say(line)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._terminal:
            sys.stderr.write("\r\x1b[K")


@contextmanager
def still(who: str, text: str) -> Iterator[None]:
    """Say now and then that `text` still happens."""
    with Progress(who, text):
        yield
