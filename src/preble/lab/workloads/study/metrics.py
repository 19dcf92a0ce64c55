"""The distributions of a study, each with its name and format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from preble.lab.report.formats import number, seconds
from preble.lab.workloads.study.distribution import Distribution
from preble.lab.workloads.study.study import Study


@dataclass(frozen=True, slots=True)
class Metric:
    """One distribution of a study. `of`: returns None if a workload has no such numbers. `is_share`: 0 … 1."""

    name: str
    of: Callable[[Study], Distribution | None]
    unit: str = ""
    is_share: bool = False

    def text(self, value: float) -> str:
        """Return one of its numbers as text.

        >>> GAP.text(0.1184), SHARED.text(0.88), PROMPT.text(9865.04)
        ('118 ms', '88.0 %', '9,865')
        """
        if self.is_share:
            return f"{value:.1%}".replace("%", " %")
        return seconds(value) if self.unit == "s" else number(value)

    def mean_and_sd(self, study: Study) -> str:
        """Return mean ± standard deviation; a dash if the workload has no such numbers."""
        spread = self.of(study)
        if spread is None:
            return "-"
        if self.is_share:
            return f"{spread.mean * 100:.1f} ± {spread.sd * 100:.1f} %"
        return f"{self.text(spread.mean)} ± {self.text(spread.sd)}"


PROMPT = Metric("prompt", lambda study: study.prompt_tokens, "tokens")
OUTPUT = Metric("output", lambda study: study.output_tokens, "tokens")
RATIO = Metric("prompt / output", lambda study: study.prompt_to_output)
SHARED = Metric("shared prefix in prompt", lambda study: study.sharing.fraction, is_share=True)
KEY_PORTION = Metric("key portion in prompt", lambda study: study.sharing.key_portions.fraction, is_share=True)
KEY_REQUESTS = Metric("requests per key portion", lambda study: study.sharing.key_portions.requests)
GAP = Metric("gap between arrivals", lambda study: study.arrivals.gap_s if study.arrivals else None, "s")
SESSION = Metric("requests of a session", lambda study: study.sessions.requests if study.sessions else None)
GROWTH = Metric("growth of a prompt", lambda study: study.sessions.growth_tokens if study.sessions else None, "tokens")

METRICS = (PROMPT, OUTPUT, RATIO, SHARED, KEY_PORTION, KEY_REQUESTS, GAP, SESSION, GROWTH)
