"""Scripts of the repository as modules: benchmarks and figures are no part of the package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def script(path: str) -> ModuleType:
    """The script at that path from the root of the repository, imported once; what stands beside it, it can import."""
    file = ROOT / path
    sys.path.insert(0, str(file.parent))
    try:
        return importlib.import_module(file.stem)
    finally:
        sys.path.remove(str(file.parent))
