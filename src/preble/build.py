"""What this installation was built from."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

UNKNOWN = "unknown"
COMMIT_FILE = "commit.txt"
"""In the package; a build writes it (dev/commit_hook.py)."""
TIMEOUT_S = 5.0


@cache
def commit() -> str:
    """Return the commit of this installation, with `-dirty` if files were changed, or `unknown`.

    A built package has it in a file. A checkout that is used in place (`pip install --editable`) asks git, once.
    """
    package = Path(__file__).parent
    try:
        return (package / COMMIT_FILE).read_text().strip()
    except OSError:
        return _commit_of(package.parents[1])


def _commit_of(checkout: Path) -> str:
    if not (checkout / ".git").exists():
        return UNKNOWN
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        run = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return UNKNOWN
    return run.stdout.strip() or UNKNOWN
