"""What the page about profiles says of their errors is what the kept results say."""

from __future__ import annotations

import json
import re
from statistics import median, quantiles

import pytest

from preble.core.costs.model import CostModel
from preble.profiles import load_profile
from support import scripts

RESULTS = scripts.ROOT / "benchmarks" / "results" / "gpu"
PAGE = (scripts.ROOT / "docs" / "reference" / "profiles.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["h100-llama-3-8b", "h100-mistral-7b", "h100x4-llama-3-70b"])
def test_the_errors_on_the_page_are_those_of_the_shipped_profile(name: str) -> None:
    model = CostModel(load_profile(name))
    errors: dict[tuple[bool, bool], list[float]] = {}
    for one in json.loads((RESULTS / f"{name}.unseen.json").read_text(encoding="utf-8")):
        prefills, decodes = [(new, cached) for new, cached in one["prefills"]], one["decodes"]
        fitted_s = model.iteration_s(prefills, len(decodes), sum(decodes))
        errors.setdefault((bool(prefills), bool(decodes)), []).append(abs(fitted_s / one["measured_s"] - 1))
    kinds = (errors[kind] for kind in ((True, False), (False, True), (True, True)))
    cells = " | ".join(f"{median(kind) * 100:.1f} %, {quantiles(kind, n=20)[-1] * 100:.1f} %" for kind in kinds)
    assert re.search(rf"^\| {name} \| {re.escape(cells)} \|$", PAGE, flags=re.MULTILINE), cells
