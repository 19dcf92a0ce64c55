"""`preble epp`, with another HTTP/2: python epp_by.py h2|hand|grpcio epp ARGUMENTS..."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from preble.cli import main
from preble.picker import calls, server


def use(name: str) -> None:
    """Have the picker speak HTTP/2 by this implementation; `h2` is its own."""
    if name == "hand":
        from picker_parts.by_hand import Connection

        calls.Connection = Connection  # type: ignore[assignment,misc]
    elif name == "grpcio":
        from picker_parts.by_grpc import CallServer

        server.CallServer = CallServer  # type: ignore[assignment,misc]


if __name__ == "__main__":
    use(sys.argv.pop(1))
    main()
