"""`python -m preble` is the command `preble`."""

from __future__ import annotations

from preble.cli import main

if __name__ == "__main__":
    main()
