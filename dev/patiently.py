#!/usr/bin/env python3
"""Run a command that says little, and say every 10 seconds that it still runs.

python3 dev/patiently.py "building the documentation" mkdocs build
"""

from __future__ import annotations

import subprocess
import sys

from environments.speak import still

if __name__ == "__main__":
    what, *command = sys.argv[1:]
    with still("make", what):
        try:
            status = subprocess.run(command, check=False).returncode
        except KeyboardInterrupt:
            status = 130
    sys.exit(status if status >= 0 else 128 - status)
