"""The adapters by name: built in, installed by other packages, or named as `module:Class`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from preble.engines.adapter import Engine
from preble.engines.openai import OpenAIEngine
from preble.engines.sglang import SglangEngine
from preble.engines.vllm import VllmEngine
from preble.errors import ConfigError

ENTRY_POINTS = "preble.engines"
"""The entry point group in which a package names its adapters."""

AUTO = "auto"

_BUILT_IN: MappingProxyType[str, type[Engine]] = MappingProxyType(
    {"vllm": VllmEngine, "sglang": SglangEngine, "openai": OpenAIEngine}
)


def engine_class(name: str) -> type[Engine]:
    """The adapter of this name. Raises: ConfigError: there is none, or it cannot be loaded."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    for installed in entry_points(group=ENTRY_POINTS, name=name):
        return _checked(name, _loaded(installed))
    if ":" in name:
        return _checked(name, _imported(name))
    known = ", ".join((AUTO, *_BUILT_IN, *sorted(entry_points(group=ENTRY_POINTS).names)))
    raise ConfigError(f"unknown engine {name!r}; known: {known}, or your own as module:Class")


def engine_classes() -> Iterator[type[Engine]]:
    """Every adapter that `auto` may find: installed ones first, because a built-in one may recognize too much.

    Raises: ConfigError: an installed one cannot be loaded.
    """
    for installed in entry_points(group=ENTRY_POINTS):
        yield _checked(installed.name, _loaded(installed))
    yield from _BUILT_IN.values()


def _loaded(installed: EntryPoint) -> Any:
    try:
        return installed.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the engine {installed.name!r} ({installed.value}) cannot be loaded: {error}") from error


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"the engine {name!r} cannot be loaded: {error}") from error


def _checked(name: str, adapter: Any) -> type[Engine]:
    if not (isinstance(adapter, type) and issubclass(adapter, Engine)):
        raise ConfigError(f"the engine {name!r} is no subclass of preble.engines.Engine")
    return adapter
