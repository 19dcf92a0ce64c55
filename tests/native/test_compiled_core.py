"""`make test-native` tests the compiled core, and every other run the sources: no stale compiled module in between."""

from __future__ import annotations

import importlib
import os

import pytest

COMPILED = ("belief", "fleet", "global_scheduler", "holdings", "load_window", "policy", "prefix_index", "radix_tree")


@pytest.mark.parametrize("name", COMPILED)
def test_the_core_is_what_this_run_is_to_test(name: str) -> None:
    path = importlib.import_module(f"preble.core.{name}").__file__
    assert path is not None and path.endswith(".so" if os.environ.get("PREBLE_TEST_NATIVE") == "1" else ".py")
