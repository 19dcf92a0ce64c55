"""Which policy made the kept results: a change of `preble` names the pages that are now of an earlier one."""

from __future__ import annotations

import msgspec
import pytest

from support.scripts import script

MADE_ANEW = ("bound",)
"""Results that pages promise something by."""


def test_pages_say_which_results_are_not_of_todays_policy() -> None:
    made_by, page = script("benchmarks/repro/made_by.py"), script("benchmarks/repro/page.py")
    values, shown = made_by.values(), set()
    for path in made_by.PAGES:
        text = path.read_text(encoding="utf-8")
        shown |= values.keys() & set(page.names(text))
        assert page.filled(text, values) == text, f"{path.name}: run benchmarks/repro/made_by.py"
    assert shown == values.keys()


def test_what_is_promised_was_measured_of_todays_policy() -> None:
    made_by = script("benchmarks/repro/made_by.py")
    old = [name for name in MADE_ANEW if made_by.makers()[name].policy != made_by.policy_digest()]
    assert not old, f"make anew: {old}"


def test_another_policy_makes_every_result_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made_by = script("benchmarks/repro/made_by.py")
    monkeypatch.setattr(made_by, "policy_digest", lambda: "another")
    assert all(value.endswith("not today's") for value in made_by.values().values())
    today = {name: msgspec.structs.replace(maker, policy="another") for name, maker in made_by.makers().items()}
    monkeypatch.setattr(made_by, "makers", lambda: today)
    assert set(made_by.values().values()) == {"today's `preble`"}
