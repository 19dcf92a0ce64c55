"""Code of users: classes named as `module:Class`, or by the entry points of installed packages."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from preble.errors import ConfigError


def installed(group: str) -> dict[str, str]:
    """Return the entry points of a group: name -> `module:Class`, names sorted."""
    return {found.name: found.value for found in sorted(entry_points(group=group))}


def load_class(kind: str, name: str, path: str) -> type[Any]:
    """Return the class at `path`, `module:Class`. `kind` and `name` are for error messages: a policy, an engine.

    The module is looked for where Python finds modules, and in the current directory.
    Raises: ConfigError: it cannot be loaded; the message says why.
    """
    module_name, _, class_name = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            problem = f"there is no module {module_name!r} in {here} or on Python's path"
        else:
            problem = f"importing {module_name} failed: {type(error).__name__}: {error}"
        raise ConfigError(f"{kind} {name!r}: {problem}") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise ConfigError(f"{kind} {name!r}: the module {module_name} has no class {class_name!r}")
    return found
