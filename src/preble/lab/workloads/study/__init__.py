"""Studies of workloads: lengths of prompts, what they share, and how requests arrive.

`study` computes the numbers of the paper's Table 1, and more, for any workload; `study_page` compares several.
"""

from __future__ import annotations

from preble.lab.workloads.study.distribution import Distribution as Distribution
from preble.lab.workloads.study.distribution import distribution as distribution
from preble.lab.workloads.study.page import draw_cdf as draw_cdf
from preble.lab.workloads.study.page import study_page as study_page
from preble.lab.workloads.study.prefixes import KeyPortions as KeyPortions
from preble.lab.workloads.study.prefixes import PrefixSharing as PrefixSharing
from preble.lab.workloads.study.prefixes import study_sharing as study_sharing
from preble.lab.workloads.study.sessions import SessionStudy as SessionStudy
from preble.lab.workloads.study.sessions import study_sessions as study_sessions
from preble.lab.workloads.study.study import Study as Study
from preble.lab.workloads.study.study import StudyReport as StudyReport
from preble.lab.workloads.study.study import Tokenize as Tokenize
from preble.lab.workloads.study.study import study as study
from preble.lab.workloads.study.tables import summary_tables as summary_tables
from preble.lab.workloads.study.timing import ArrivalStudy as ArrivalStudy
from preble.lab.workloads.study.timing import study_arrivals as study_arrivals
