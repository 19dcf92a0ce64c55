"""docs/reference/policies.md, compared with the policies: every name, every knob with its default, the example."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from preble.core.policies.registry import make_policy, policy_names

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "policies.md").read_text(encoding="utf-8")
ROWS = {
    name: [cell.strip() for cell in rest.split("|")]
    for name, rest in re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, flags=re.MULTILINE)
}


def knobs(name: str) -> dict[str, Any]:
    """The settings of a policy as it is made by this name."""
    policy = make_policy(name)
    parameters = inspect.signature(type(policy)).parameters.values()
    return {p.name: getattr(policy, f"_{p.name}", p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_every_policy_has_its_row_in_order() -> None:
    assert tuple(ROWS) == policy_names()


@pytest.mark.parametrize("name", policy_names())
def test_a_row_says_rule_knobs_source_and_weakness(name: str) -> None:
    rule, documented, source, weakness = ROWS[name]
    assert min(map(len, (rule, weakness))) > 10 and source
    found = re.findall(r"`(\w+)` ([\w.]+)", documented)
    assert dict(found) == {knob: str(value) for knob, value in knobs(name).items()}


def run_example(number: int) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(examples[number], "policies.md", "exec"), {})


def test_the_example_prints_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    run_example(0)
    [rps] = re.findall(r"^steady state (\d+\.\d) requests/s$", capsys.readouterr().out, flags=re.MULTILINE)
    assert float(rps) > 0


def test_the_example_with_other_settings_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run_example(1)
    assert re.findall(r"^(0\.\d) 0\.\d+$", capsys.readouterr().out, flags=re.MULTILINE) == ["0.1", "0.3", "0.5"]
