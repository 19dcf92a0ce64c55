"""An emulated replica as a process of its own, for tests of the command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def emulated() -> Iterator[str]:
    """Its URL."""
    argv = [sys.executable, "-m", "preble", "emulate", "--profile", "tiny-cpu", "--port", "0"]
    argv += ["--speed", "2", "--kv-tokens", "4096", "--max-model-len", "1500"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
