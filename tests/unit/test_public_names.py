"""The package's public names are a list that changes only on purpose."""

from __future__ import annotations

import preble
from preble import errors

PUBLIC_NAMES = ["__version__"]


def test_the_public_names_are_these() -> None:
    assert sorted(preble.__all__) == PUBLIC_NAMES


def test_every_public_name_exists() -> None:
    assert [name for name in preble.__all__ if not hasattr(preble, name)] == []


def test_every_error_is_drawn_in_the_tree() -> None:
    drawn = errors.__doc__ or ""
    missing = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and name not in drawn
    ]
    assert missing == []


def test_every_error_descends_from_the_root() -> None:
    strangers = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and not issubclass(value, errors.PrebleError)
    ]
    assert strangers == []
