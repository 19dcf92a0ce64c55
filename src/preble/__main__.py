"""The command `preble`, also as `python -m preble`."""

from __future__ import annotations

import sys

_INTERRUPTED_STATUS = 130


def main() -> None:
    """Run the command line and exit. Ctrl-C shows no traceback, even while the command line is being imported."""
    try:
        from preble.cli import main as run
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED_STATUS)
    run()


if __name__ == "__main__":
    main()
