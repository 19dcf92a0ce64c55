"""How-to pages name settings, metrics, policies and flags that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from preble.config import GatewayConfig
from preble.config.knobs import knobs
from preble.core.policies.registry import policy_names

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [pytest.param(page.read_text(encoding="utf-8"), id=page.stem) for page in sorted((DOCS / "howto").glob("*.md"))]
SETTINGS = {knob.key for knob in knobs(GatewayConfig)}
SECTIONS = {key.partition(".")[0] for key in SETTINGS if "." in key}
OF_THE_CHART = {"picker.enabled"}
"""Values of the Helm chart, which look like settings."""

NO_METRICS = {"preble_own_engine"}
"""A package in an example."""

METRICS = set(re.findall(r"\bpreble_[a-z_]+", (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_settings_that_there_are(page: str) -> None:
    named = {key for key in re.findall(r"`([a-z]+\.[a-z_]+)(?: = [^`]+)?`", page) if key.partition(".")[0] in SECTIONS}
    assert named <= SETTINGS | OF_THE_CHART


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_metrics_that_there_are(page: str) -> None:
    named = set(re.findall(r"\bpreble_[a-z_]*[a-z]\b", page))
    assert {name for name in named if not any(known.startswith(name) for known in METRICS)} <= NO_METRICS


def test_the_page_about_other_routers_names_policies_that_there_are() -> None:
    page = (DOCS / "howto" / "migrating.md").read_text(encoding="utf-8")
    named = {name for listed in re.findall(r"--policy ([\w,]+)", page) for name in listed.split(",")}
    theirs = {"cache_aware"}
    assert named - theirs <= set(policy_names())
