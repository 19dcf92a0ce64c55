"""The adapters by name: built in, installed by other packages, or named as `module:Class`."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from preble.engines.adapter import Engine
from preble.engines.openai import OpenAIEngine
from preble.engines.sglang.client import SglangEngine
from preble.engines.vllm.client import VllmEngine
from preble.errors import ConfigError
from preble.plugins.classes import installed, load_class

ENTRY_POINTS = "preble.engines"
"""The entry point group in which a package names its adapters."""

AUTO = "auto"

_BUILT_IN: MappingProxyType[str, type[Engine]] = MappingProxyType(
    {"vllm": VllmEngine, "sglang": SglangEngine, "openai": OpenAIEngine}
)


def engine_class(name: str) -> type[Engine]:
    """Return the adapter of this name. Raises: ConfigError: there is none, or it cannot be loaded."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    by_packages = installed(ENTRY_POINTS)
    path = name if ":" in name else by_packages.get(name)
    if path is not None:
        return _loaded(name, path)
    known = ", ".join((AUTO, *_BUILT_IN, *by_packages))
    raise ConfigError(f"unknown engine {name!r}; known: {known}, or your own as module:Class")


def may_be_own(name: str) -> bool:
    """Return whether this name may stand for an adapter that is not built in."""
    return bool(installed(ENTRY_POINTS)) if name == AUTO else name not in _BUILT_IN


def engine_classes() -> Iterator[type[Engine]]:
    """Yield every adapter that `auto` may find: installed ones first, because a built-in one may recognize too much.

    Raises: ConfigError: an installed one cannot be loaded.
    """
    for name, path in installed(ENTRY_POINTS).items():
        yield _loaded(name, path)
    yield from _BUILT_IN.values()


def _loaded(name: str, path: str) -> type[Engine]:
    adapter = load_class("engine", name, path)
    if not issubclass(adapter, Engine):
        raise ConfigError(f"the engine {name!r} is no subclass of preble.engines.Engine")
    return adapter
