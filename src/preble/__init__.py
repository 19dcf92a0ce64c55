"""Preble: distributed prompt scheduling for LLM serving.

The public names are those of `preble.api`. They are imported when the first of them is used, so that `import preble`
costs nothing. Reference: docs/reference/python.md.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from preble.api import *  # noqa: F403

__version__ = "0.1.0.dev0"


if not TYPE_CHECKING:  # a type checker that sees it takes every name, misspelled ones too

    def __getattr__(name: str) -> Any:
        from importlib.util import find_spec  # costs more than all of the rest

        # `from preble import sim` asks here first: a module of ours must not import all the others.
        if (name.startswith("_") and name != "__all__") or find_spec(f"preble.{name}") is not None:
            raise AttributeError(name)
        public = __dir__()
        if name != "__all__" and name not in public:
            raise AttributeError(f"preble has no public name {name!r}; see docs/reference/python.md")
        value = globals()[name] = public if name == "__all__" else getattr(import_module("preble.api"), name)
        return value


def __dir__() -> list[str]:
    api = import_module("preble.api")
    imported = {
        name for name, value in vars(api).items() if not (name.startswith("_") or isinstance(value, ModuleType))
    }
    of_laboratory = " ".join(api.LABORATORY.values()).split()
    return sorted({*imported, *of_laboratory, "__version__"} - {"annotations", "LABORATORY"})
