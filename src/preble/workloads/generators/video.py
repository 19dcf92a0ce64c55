"""Questions about videos: a sentence, a video as tokens, a multiple-choice question (the paper's Video QA, NExT-QA).

Table 1, (mean, sd): prompt (9865, 5976), output (4, 1.5), shared (88 %, 32 %), key portion (99 %, 0.2 %), requests to a
key portion (8.6, 2). Made so, but for the deviation of the key portion, 0.4 %: NExT-QA itself, which gives the other
numbers to the digit, has 0.37 %.
"""

from __future__ import annotations

from preble.workloads.generators.shared_prefix import SharedPrefix
from preble.workloads.lengths import Lengths

VIDEO = SharedPrefix(
    name="video",
    noun="video",
    system_tokens=13,
    shared_tokens=Lengths("lognormal", 9860, 6130, low=1500, high=38_400),
    uses=Lengths("normal", 8.6, 2),
    question_tokens=Lengths("normal", 28, 7.5, low=8, high=70),
    output_tokens=Lengths("normal", 4, 1.5),
)
