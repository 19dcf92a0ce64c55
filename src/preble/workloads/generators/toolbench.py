"""Tool use: a system prompt, the documentation of one of many tools, a task for it (the paper's Toolbench).

Table 1, (mean, sd): prompt (1835, 742), output (43, 16), shared (85 %, 13 %), key portion (76 %, 16 %), requests to a
key portion (39, 64). Made so, but for the deviation of the key portion, 11 %: the first request for a tool misses its
documentation, which alone gives the shared fraction a deviation of 12 % of its 13 %, so that prompts must be alike in
their proportions otherwise.
"""

from __future__ import annotations

from preble.workloads.generators.shared_prefix import SharedPrefix
from preble.workloads.lengths import Lengths

TOOLBENCH = SharedPrefix(
    name="toolbench",
    noun="tool",
    system_tokens=190,
    shared_tokens=Lengths("gamma", 1430, 760, low=60, high=3700),
    uses=Lengths("lognormal", 42, 80, high=650),
    question_tokens=Lengths("lognormal", 205, 90, low=20, high=600),
    output_tokens=Lengths("normal", 43, 16),
)
