#!/usr/bin/env python3
"""Run a command that says little, and say every 10 seconds that it still runs.

python3 dev/patiently.py "building the documentation" mkdocs build
python3 dev/patiently.py --log pip.log "installing" pip install .    show what it says only if it fails
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from environments.recipe import last_lines
from environments.speak import say, still


def run(what: str, command: list[str], log: Path | None = None) -> int:
    """Run a command, its output into `log` if there is one. Returns its exit status, above 128 if a signal ended it."""
    with still("make", what):
        try:
            if log is None:
                status = subprocess.run(command, check=False).returncode
            else:
                with log.open("w") as file:
                    status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
        except KeyboardInterrupt:
            return 130
    if log is not None and status != 0:
        say(f"make: {what} failed; the last lines ({log} has all of them):\n{last_lines(log)}")
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    args = sys.argv[1:]
    log = Path(args[1]) if args[0] == "--log" else None
    what, *command = args[2:] if log else args
    sys.exit(run(what, command, log))
