"""Studies of workloads: lengths of prompts, what they share, and how requests arrive.

`study` computes the numbers of the paper's Table 1, and more, for any workload; `study_page` compares several.
"""

from __future__ import annotations

from preble.lab.workloads.study.distribution import Distribution, distribution
from preble.lab.workloads.study.page import draw_cdf, study_page
from preble.lab.workloads.study.prefixes import KeyPortions, PrefixSharing, study_sharing
from preble.lab.workloads.study.sessions import SessionStudy, study_sessions
from preble.lab.workloads.study.study import Study, StudyReport, Tokenize, study
from preble.lab.workloads.study.tables import summary_tables
from preble.lab.workloads.study.timing import ArrivalStudy, study_arrivals

__all__ = [
    "ArrivalStudy",
    "Distribution",
    "KeyPortions",
    "PrefixSharing",
    "SessionStudy",
    "Study",
    "StudyReport",
    "Tokenize",
    "distribution",
    "draw_cdf",
    "study",
    "study_arrivals",
    "study_page",
    "study_sessions",
    "study_sharing",
    "summary_tables",
]
