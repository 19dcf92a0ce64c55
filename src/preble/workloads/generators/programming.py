"""Programs to be written: a long demonstration that all share, a problem, many parallel samples (the paper's APPS).

Table 1, (mean, sd): prompt (3871, 1656), output (190, 343), shared (97 %, 7.4 %), key portion (78 %, 13 %), requests to
a key portion (126, 2157). Made so. The last deviation is a matter of how many requests there are: the demonstration is
the key portion of all problems shorter than itself, so that it grows with the root of their number, and is 2157 at
about 55,000.
"""

from __future__ import annotations

from preble.workloads.generators.shared_prefix import SharedPrefix
from preble.workloads.lengths import Lengths

PROGRAMMING = SharedPrefix(
    name="programming",
    noun="problem",
    system_tokens=2400,
    shared_tokens=Lengths("lognormal", 1480, 2300, low=50, high=9_000),
    uses=Lengths("normal", 21, 4),
    question_tokens=Lengths("normal", 25, 0),
    output_tokens=Lengths("lognormal", 197, 390, high=4096),
)
